"""The console's routes: its files, the feed of snapshots, and access to them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
import trio

from tests.support.http_stub import StubEngine, app_of, http_client, server_config
from trioserve.engine.engine import Engine
from trioserve.http import create_app
from trioserve.http.api.app import App
from trioserve.http.api.console.files import FOLDER, SECURITY_HEADERS
from trioserve.http.server.server import serve_app
from trioserve.observability.live import MAX_WATCHERS, monitor_of
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import open_fake_engine

LIVE = "/console/live?interval=0.1"


@contextlib.asynccontextmanager
async def serving(
    make_worker: Callable[[], FakeWorker] = FakeWorker, **options: Any
) -> AsyncIterator[tuple[Engine, str, trio.Event]]:
    """Yield a fake engine behind a real server, its URL, and an event that lets it drain."""
    config = server_config(**options)
    shutdown = trio.Event()

    async def run(app: App, *, task_status: trio.TaskStatus[list[str]]) -> None:
        await serve_app(
            app, config, shutdown=shutdown, on_drain=engine.drain, task_status=task_status
        )

    async with open_fake_engine(make_worker) as engine, trio.open_nursery() as nursery:
        (url,) = await nursery.start(run, create_app(engine, config))
        yield engine, url, shutdown
        nursery.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def feed(
    url: str, path: str = LIVE, **headers: str
) -> AsyncIterator[AsyncIterator[tuple[str, Any]]]:
    """Return the events of the feed: their names and data."""

    async def events(response: httpx.Response) -> AsyncIterator[tuple[str, Any]]:
        name = ""
        async for line in response.aiter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                yield name, json.loads(line.removeprefix("data: "))

    with trio.fail_after(60):
        async with http_client(url) as client, client.stream("GET", path, headers=headers) as got:
            assert got.status_code == 200, await got.aread()
            assert got.headers["content-type"] == "text/event-stream"
            assert got.headers["cache-control"] == "no-cache"
            async with contextlib.aclosing(events(got)) as read:
                yield read


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(60):
        while not condition():
            await trio.sleep(0.01)


async def test_the_page_and_its_files_need_no_key_and_run_nothing_else() -> None:
    client = app_of(StubEngine(), api_key=("key",)).test_client()
    page = await client.get("/console")
    assert page.status_code == 200
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    assert (await page.get_data()) == (FOLDER / "index.html").read_bytes()
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert len(files) > 10
    for path in files:
        url = f"/console/static/{path.relative_to(FOLDER).as_posix()}"
        response = await client.get(url)
        assert response.status_code == 200, path
        assert (await response.get_data()) == path.read_bytes()
        assert response.headers["Cache-Control"] == "no-cache"
        for name, value in SECURITY_HEADERS.items():
            assert response.headers[name] == value
        known = {"If-None-Match": response.headers["ETag"]}
        again = await client.get(url, headers=known)
        assert (again.status_code, await again.get_data()) == (304, b"")
        assert again.headers["ETag"] == response.headers["ETag"]
    policy = page.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert "http" not in policy


BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


@pytest.mark.parametrize("root_path", ["", "/llm"])
async def test_a_browser_is_led_to_the_console(root_path: str) -> None:
    client = app_of(StubEngine(), api_key=("key",), root_path=root_path).test_client()
    home = await client.get("/", headers=BROWSER)
    assert (home.status_code, home.headers["Location"]) == (307, "console")
    slash = await client.get("/console/")
    assert (slash.status_code, slash.headers["Location"]) == (307, "../console")
    key = {"Authorization": "Bearer key"}
    for accept in ("*/*", "application/json", "application/json, text/html"):
        assert (await client.get("/", headers={"Accept": accept})).status_code == 401
        welcome = await client.get("/", headers={"Accept": accept, **key})
        assert (await welcome.get_json())["name"] == "trioserve"
    without = app_of(StubEngine(), console=False).test_client()
    assert (await (await without.get("/", headers=BROWSER)).get_json())["name"] == "trioserve"
    assert (await without.get("/console/")).status_code == 404


@pytest.mark.parametrize(
    "name",
    [
        *("css/../../files.py", "..%2ffiles.py", "%2e%2e/files.py", "../files.py"),
        *("css", "css/", "missing.js", "index.html%00.js", "index.html/", "x" * 5000),
        *("files.py", ".hidden.js", "css%2f..%2findex.html", "INDEX.HTML"),
    ],
)
async def test_no_other_file_is_served(name: str) -> None:
    response = await app_of(StubEngine()).test_client().get(f"/console/static/{name}")
    assert response.status_code == 404


async def test_it_can_be_left_out() -> None:
    client = app_of(StubEngine(), console=False).test_client()
    for path in ("/console", "/console/static/index.html", "/console/live"):
        assert (await client.get(path)).status_code == 404
    described = json.loads(await (await client.get("/openapi.json")).get_data(True))
    assert not [path for path in described["paths"] if path.startswith("/console")]


async def test_the_feed_shows_a_request_from_its_beginning_to_its_end() -> None:
    async with serving(lambda: FakeWorker(step_time=0.01)) as (engine, url, _):
        async with feed(url) as events:
            name, hello = await anext(events)
            assert (name, hello["schema"], hello["model"]) == ("hello", 1, "fake")
            assert hello["front_ends"] == 1
            assert hello["may_control"] is False
            name, picture = await anext(events)
            assert name == "picture"
            assert picture["requests"] == []
            states = []
            async with trio.open_nursery() as nursery:

                async def ask() -> None:
                    await engine.complete("abc", max_tokens=1900, request_id="watched")

                nursery.start_soon(ask)
                while "finished" not in states:
                    _, picture = await anext(events)
                    states += [row["state"] for row in picture["requests"]]
                    if "decode" in states:
                        engine.abort("watched")
            (row,) = picture["requests"]
            assert row["id"] == "watched"
            assert row["finish_reason"] == "abort"
            assert row["output_tokens"] < 1900
            assert picture["counts"]["finished_total"] == 1
        await until(lambda: not monitor_of(engine).departures.is_wanted)
        assert not engine.schedulers[0].feeds.iterations.feed.is_wanted


@pytest.mark.parametrize(
    ("query", "field", "limit"),
    [
        ("interval=0.01", "interval", "0.1"),
        ("interval=11", "interval", "10"),
        ("interval=often", "interval", "float"),
        ("interval=nan", "interval", ""),
        ("requests=1001", "requests", "1000"),
        ("requests=-1", "requests", "0"),
        ("nodes=2001", "nodes", "2000"),
        ("pictures=0", "pictures", "1"),
        ("node=1", "node", "not a field"),
    ],
)
async def test_a_query_out_of_bounds_is_refused_with_its_limit(
    query: str, field: str, limit: str
) -> None:
    response = await app_of(StubEngine()).test_client().get(f"/console/live?{query}")
    error = json.loads(await response.get_data(True))["error"]
    assert response.status_code == 400
    assert error["param"] == field
    assert field in error["message"]
    assert limit in error["message"]


async def test_the_feed_wants_a_key_and_tells_who_may_control() -> None:
    keys = {"api_key": ("the-key",), "admin_api_key": ("the-admin-key",)}
    async with serving(**keys) as (_, url, _):
        async with http_client(url) as client:
            for headers in ({}, {"Authorization": "Bearer another"}):
                assert (await client.get(LIVE, headers=headers)).status_code == 401
        for key, may in (("the-key", False), ("the-admin-key", True)):
            async with feed(url, Authorization=f"Bearer {key}") as events:
                assert (await anext(events))[1]["may_control"] is may


async def test_a_feed_of_so_many_pictures() -> None:
    async with serving() as (_, url, _), feed(url, f"{LIVE}&pictures=2") as events:
        assert [name async for name, _ in events] == ["hello", "picture", "picture"]


async def test_without_keys_only_an_admin_may_control() -> None:
    async with serving(admin_api_key=("the-admin-key",)) as (_, url, _):
        async with feed(url) as events:
            assert (await anext(events))[1]["may_control"] is False
        async with feed(url, Authorization="Bearer the-admin-key") as events:
            assert (await anext(events))[1]["may_control"] is True


async def test_only_so_many_may_watch() -> None:
    async with serving() as (engine, url, _):
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(MAX_WATCHERS):
                stack.enter_context(monitor_of(engine).watched(requests=1, nodes=1))
            async with http_client(url) as client:
                response = await client.get(LIVE)
                assert response.status_code == 429
                assert response.json()["error"]["code"] == "watcher_limit"
                assert response.headers["Retry-After"] == "1"
        async with feed(url) as events:
            assert (await anext(events))[0] == "hello"


async def test_a_head_ends() -> None:
    async with serving() as (engine, url, _), http_client(url) as client:
        for path, kind in ((LIVE, "text/event-stream"), ("/console", "text/html; charset=utf-8")):
            response = await client.head(path)
            assert response.status_code == 200
            assert response.headers["content-type"] == kind
        assert not monitor_of(engine).departures.is_wanted


async def test_a_server_that_drains_says_so_and_ends_the_feed() -> None:
    async with serving() as (_, url, shutdown):
        async with feed(url, "/console/live?interval=10") as events:
            await anext(events)
            await anext(events)
            shutdown.set()
            assert [picture["health"] async for _, picture in events] == ["draining"]


async def test_who_reads_slowly_gets_fewer_pictures_each_of_its_moment() -> None:
    pieces: list[bytes] = []
    go_on = trio.Event()
    messages = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Any:
        if not messages:
            await trio.sleep_forever()
        return messages.pop()

    async def send(message: Any) -> None:
        if message.get("body"):
            pieces.append(message["body"])
            if len(pieces) == 2:
                await go_on.wait()

    async with open_fake_engine() as engine, trio.open_nursery() as nursery:
        app: Any = create_app(engine, server_config())
        nursery.start_soon(app, get_scope("/console/live", b"interval=0.1"), receive, send)
        await until(lambda: len(pieces) == 2)
        await engine.complete("abc", max_tokens=2)
        await trio.sleep(0.3)  # Time for snapshots without a reader.
        assert len(pieces) == 2
        go_on.set()
        await until(lambda: len(pieces) > 2)
        nursery.cancel_scope.cancel()
    picture = json.loads(pieces[2].split(b"data: ")[1])
    assert picture["counts"]["finished_total"] == 1


def get_scope(path: str, query: bytes) -> Any:
    """Return a GET as ASGI has it."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query,
        "root_path": "",
        "headers": [],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "extensions": {},
    }
