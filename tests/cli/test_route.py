"""The command ``trioserve route``: its options, and its process in front of servers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import trio

from trioserve.cli.flags import router_config
from trioserve.cli.parser import parse
from trioserve.cli.route import upstreams_of
from trioserve.cli.usage import UsageError
from trioserve.config.router import RouterConfig

ROOT = Path(__file__).parents[2]
KEY = "the-admin-key"


def config_of(*words: str, **environment: str) -> RouterConfig:
    return router_config(vars(parse(["route", *words])), environment)


def test_options_are_those_of_a_server_and_its_own() -> None:
    words = ("one:1", "two:2", "--port", "0", "--routing-policy", "prefix")
    config = config_of(*words, TRIOSERVE_UPSTREAM_ADMIN_API_KEY=KEY, TRIOSERVE_API_KEY="no")
    assert config.urls == ("one:1", "two:2")
    assert config.server.port == 0
    assert config.server.api_key == ()
    assert config.server.engine.routing_policy == "prefix"
    assert config.upstream_admin_api_key == KEY
    upstreams = upstreams_of(config)
    assert [each.url for each, _ in upstreams] == ["http://one:1", "http://two:2"]
    assert {remote.headers["Authorization"] for _, remote in upstreams} == {f"Bearer {KEY}"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("ftp://one",), "expected a URL"),
        (("http://me:secret@one",), "give --upstream-admin-api-key"),
        (("one:1", "http://one:1/v1"), "http://one:1 is given twice"),
        (("https://one", "--upstream-ca-file", "/nowhere"), "--upstream-ca-file: /nowhere"),
    ],
)
def test_a_wrong_server_is_told(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        upstreams_of(config_of(*words))


@contextlib.asynccontextmanager
async def running(*command: str) -> AsyncIterator[tuple[trio.Process, str]]:
    """Run a command that serves, and yield its process and URL."""
    process = await trio.lowlevel.open_process(
        [sys.executable, "-m", *command, "--port", "0"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TRIOSERVE_UPSTREAM_ADMIN_API_KEY": KEY},
    )
    try:
        assert process.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            part = await process.stdout.receive_some()
            assert part, "the process ended"
            line += part
        yield process, line.decode().split(" at ")[1].strip()
    finally:
        process.kill()
        await process.wait()


async def test_the_process_routes_and_drains() -> None:
    serve = ("tests.support.fake_server", "serve", "fake", "--admin-api-key", KEY)
    async with (
        running(*serve) as (_, one),
        running(*serve) as (_, two),
        running("trioserve", "route", one, two) as (router, url),
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        with trio.fail_after(60):
            while not all(each["up"] for each in (await client.get("/health")).json()["servers"]):
                await trio.sleep(0.05)
        body = {"prompt": "hello", "max_tokens": 30, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            router.send_signal(signal.SIGTERM)
            data = await response.aread()
        assert data.endswith(b"data: [DONE]\n\n")
        assert await router.wait() == 0
