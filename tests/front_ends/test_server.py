"""A server of several processes: answers as of one, deaths of processes, an end in order."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import trio

from tests.cli.test_shutdown_process import (
    LAST_CHUNK,
    PATH,
    Server,
    _lives,
    last_event,
    request,
    start,
    tiny,
)
from tests.support.http_stub import connect, http_client, read_to_end, read_until
from tests.support.tls_certificates import make_authority

__all__ = ["start", "tiny"]

CHAT = "/v1/chat/completions"
TWO = ("--api-server-count", "2")
MOCK = ("--mock-worker", "10ms", *TWO)
"""The model for tests in which its answers don't matter."""
MESSAGES = [{"role": "user", "content": "the cat and the dog"}]
GREEDY = {"num_predict": 8, "temperature": 0}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (PATH, {"prompt": "hello there", "max_tokens": 12, "temperature": 0}),
    (PATH, {"prompt": ["hello", "the world"], "max_tokens": 5, "temperature": 0, "n": 2}),
    (PATH, {"prompt": "on the house", "max_tokens": 6, "temperature": 0, "logprobs": 3}),
    (PATH, {"prompt": "on the house", "max_tokens": 1, "echo": True, "logprobs": 2, "seed": 1}),
    (PATH, {"prompt": "is there", "max_tokens": 60, "temperature": 0, "stop": ["e", " "]}),
    (PATH, {"prompt": "of you", "max_tokens": 9, "seed": 5, "temperature": 0.8, "n": 3}),
    (
        PATH,
        {"prompt": "a", "max_tokens": 9, "seed": 2, "structured_outputs": {"regex": "[xyz]{4}"}},
    ),
    (CHAT, {"messages": MESSAGES, "max_tokens": 9, "temperature": 0, "stream": True}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 7, "temperature": 0, "logprobs": True}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 8, "temperature": 0}),
    ("/v1/messages/count_tokens", {"messages": MESSAGES}),
    ("/api/chat", {"messages": MESSAGES, "stream": False, "options": GREEDY}),
    ("/api/generate", {"prompt": "hello", "raw": True, "stream": False, "options": GREEDY}),
    ("/api/show", {}),
    (PATH, {"prompt": "x", "max_tokens": 100_000}),
    (PATH, {"prompt": "x", "structured_outputs": {"regex": "("}}),
]
CHANGING = {
    *("id", "created", "cached_tokens", "prompt_tokens_details"),
    *("input_tokens", "cache_read_input_tokens", "created_at", "modified_at", "total_duration"),
    *("prompt_eval_duration", "eval_duration"),
}


def lasting(value: Any) -> Any:
    """Return the part of an answer that doesn't depend on the rest of its batch."""
    if isinstance(value, float):
        return pytest.approx(value, abs=1e-3)
    if isinstance(value, dict):
        return {name: lasting(each) for name, each in value.items() if name not in CHANGING}
    return [lasting(each) for each in value] if isinstance(value, list) else value


def whole(response: httpx.Response) -> Any:
    """Return the answer; the texts of a stream's events together."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        return response.status_code, lasting(response.json())
    *events, done = response.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    return response.status_code, text, choices[-1]["finish_reason"]


async def answers(url: str, **options: Any) -> list[Any]:
    """Return the answers to ``BODIES``, which come at once, each over a connection."""
    found: dict[int, Any] = {}

    async def ask(index: int) -> None:
        path, body = BODIES[index]
        async with http_client(url, **options) as client:
            found[index] = whole(await client.post(path, json=body, timeout=60))

    async with trio.open_nursery() as nursery:
        for index in range(len(BODIES)):
            nursery.start_soon(ask, index)
    return [found[index] for index in range(len(BODIES))]


def front_ends(server: Server) -> list[psutil.Process]:
    """Return the live processes by age."""
    found = []
    for child in server.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "trioserve.front_ends" in child.cmdline():
                found.append(child)
    return sorted(found, key=lambda process: process.create_time())


async def until(condition: Callable[[], Awaitable[bool]], within: float = 60) -> None:
    with trio.fail_after(within):
        while not await condition():
            await trio.sleep(0.02)


async def values(url: str) -> dict[str, float]:
    """Return the metrics that have one value, by their names."""
    async with http_client(url) as client:
        lines = (await client.get("/metrics")).text.splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name.partition("{")[0]: float(value) for name, value in pairs}


async def load(url: str) -> dict[str, int]:
    async with http_client(url) as client:
        found: dict[str, int] = (await client.get("/load")).json()
    return found


async def snapshot(url: str) -> Any:
    """Return the server as the console's feed shows it."""
    async with http_client(url) as client:
        text = (await client.get("/console/live?pictures=1")).text
    *_, last = text.removesuffix("\n\n").split("\n\n")
    name, _, data = last.partition("\ndata: ")
    assert name == "event: picture"
    return json.loads(data)


async def nothing_runs(url: str) -> bool:
    found = await load(url)
    return found["num_reqs"] == found["num_tokens"] == 0


async def test_the_answers_are_those_of_one_process(tiny: Path, start: Any) -> None:
    one = start(tiny, "--dtype", "float32")
    log = ("--log-level", "info", "--log-format", "json")
    two = start(tiny, "--dtype", "float32", *TWO, *log)
    one.wait_until_it_serves()
    two.wait_until_it_serves()
    expected = await answers(one.url)
    assert [each[0] for each in expected] == [200] * 14 + [400] * 2
    assert await answers(two.url) == expected
    counted = await values(two.url)
    # Each answer's outputs, and no others.
    assert counted["trioserve:e2e_request_latency_seconds_count"] == 13
    assert counted["trioserve:request_rejections_total"] == 2
    for server in (one, two):
        server.process.send_signal(signal.SIGTERM)
    await one.ended()
    code, lines = await two.ended()
    assert code == 0
    events = [json.loads(line) for line in lines.splitlines()]
    requests = [event for event in events if event["event"] == "request"]
    assert len(requests) == len(BODIES) + 1
    assert {event["front_end"] for event in requests} <= {0, 1}


async def talk(url: str, session: str) -> list[Any]:
    """Return the answers of a conversation's turns, each over a connection of its own."""
    found: list[Any] = []

    async def post(path: str, body: dict[str, Any]) -> None:
        async with http_client(url) as client:
            response = await client.post(path, json=body, timeout=60)
        if response.headers["content-type"].startswith("text/event-stream"):
            *events, done = response.text.removesuffix("\n\n").split("\n\n")
            assert done == "data: [DONE]"
            answer = json.loads(events[-1].removeprefix("data: "))
        else:
            answer = response.json()
        if isinstance(answer, dict):
            names = ("output_ids", "prompt_token_ids", "error", "success")
            answer = {name: answer[name] for name in names if name in answer}
        found.append((response.status_code, answer))

    async def turn(text: str, rid: str, after: str | None = None, **fields: Any) -> None:
        params = {"id": session, "rid": after, **fields.pop("params", {})}
        body = {
            "text": text,
            "rid": rid,
            "session_params": params,
            "sampling_params": {"max_new_tokens": 8, "temperature": 0},
            "return_prompt_token_ids": True,
            **fields,
        }
        await post("/generate", body)

    await post("/open_session", {"capacity_of_str_len": 1000, "session_id": session})
    await turn("hello there", "a")
    for number, rid in enumerate("bcdefg"):
        await turn(" and more", rid, "abcdefg"[number], stream=number % 2 == 0)
    await turn(" branch", "h", "c", params={"offset": 5})
    await turn(" instead", "i", "a", params={"replace": True})
    await turn("!", "j", "b")
    await turn("!", "k", "i", params={"drop_previous_output": True}, stream=True)
    await turn("!", "l", "nobody", stream=True)
    return found


async def test_a_session_over_whichever_front_end_is_that_of_one_process(
    tiny: Path, start: Any
) -> None:
    one = start(tiny, "--dtype", "float32")
    two = start(tiny, "--dtype", "float32", "--max-worker-restarts", "10", *TWO)
    one.wait_until_it_serves()
    two.wait_until_it_serves()
    expected = await talk(one.url, "mine")
    assert [status for status, _ in expected] == [200] * 10 + [400, 200, 400]
    assert await talk(two.url, "mine") == expected
    # A session outlives the front ends that its turns came over.
    for victim in front_ends(two):
        victim.kill()

        async def is_replaced(victim: psutil.Process = victim) -> bool:
            found = front_ends(two)
            return victim not in found and len(found) == 2

        await until(is_replaced)
    assert (await values(two.url))["trioserve:sessions"] == 1
    assert await talk(two.url, "other") == [(200, "other"), *expected[1:]]
    for server in (one, two):
        server.process.send_signal(signal.SIGTERM)
        assert (await server.ended())[0] == 0


async def test_tls_over_a_unix_socket_and_a_client_that_leaves(start: Any, tmp_path: Path) -> None:
    authority = make_authority(tmp_path / "certificates")
    certificate, key = authority.issue("server")
    path = tmp_path / "server.sock"
    server = start(
        Path("smollm2-135m"),
        *MOCK,
        *("--uds", str(path), "--ssl-certfile", certificate, "--ssl-keyfile", key),
    )
    server.wait_until_it_serves()
    context = ssl.create_default_context(cafile=authority.file)
    for _ in range(4):
        transport = httpx.AsyncHTTPTransport(uds=str(path), verify=context)
        async with http_client("https://127.0.0.1", transport=transport) as client:
            assert (await client.get("/health")).json() == {"status": "ok"}
            with contextlib.suppress(httpx.TimeoutException):
                body = {"prompt": "x", "max_tokens": 5000, "ignore_eos": True}
                await client.post(PATH, json=body, timeout=0.3)
    transport = httpx.AsyncHTTPTransport(uds=str(path), verify=context)
    async with http_client("https://127.0.0.1", transport=transport) as client:

        async def is_idle() -> bool:
            found = (await client.get("/load")).json()
            return bool(found["num_reqs"] == found["num_tokens"] == found["server_load"] == 0)

        await until(is_idle)
    server.process.send_signal(signal.SIGTERM)
    assert await server.ended() == (0, "")
    assert not path.exists()


async def test_a_front_end_that_is_killed_under_load(start: Any) -> None:
    server = start(Path("smollm2-135m"), *MOCK, "--log-format", "json")
    server.wait_until_it_serves()
    await _all_dump(server)
    victim, other = front_ends(server)
    clients, held = await _clients_of_both(server, other)
    victim.kill()

    async def is_left_alone() -> bool:
        return (await load(server.url))["num_reqs"] == len(held)

    # The requests of the dead are gone at once, and the others go on.
    await until(is_left_alone, within=30)
    for client in clients:
        if client in held:
            await read_until(client, b"data: {")
        else:
            assert not (await read_to_end(client)).endswith(LAST_CHUNK)
        await client.aclose()
    await until(lambda: nothing_runs(server.url))

    async def is_replaced() -> bool:
        return len(front_ends(server)) == 2

    await until(is_replaced)
    assert victim not in front_ends(server)
    await (await server.stream(max_tokens=2)).aclose()
    await _end(server, "drain")


async def _all_dump(server: Server) -> None:
    """Have all processes log what their tasks do, which the engine's process is asked for."""
    assert server.process.stderr is not None
    descriptor = server.process.stderr.fileno()

    def are_there(data: bytes) -> bool:
        front_ends = (b'"front_end": 0', b'"front_end": 1')
        return data.count(b'"task dump"') >= 3 and all(each in data for each in front_ends)

    with trio.fail_after(60):
        data = b""
        while not are_there(data):
            data = b""
            server.process.send_signal(signal.SIGUSR1)
            # What isn't taken soon is dropped or mixed with what others say: then again.
            with trio.move_on_after(5):
                while not are_there(data):
                    await trio.lowlevel.wait_readable(descriptor)
                    data += os.read(descriptor, 1 << 16)


async def _end(server: Server, how: str) -> None:
    """End the server with streams that run, in one of several ways."""
    max_tokens = 60 if how == "drain" else 8000
    clients = [await server.stream(max_tokens=max_tokens) for _ in range(8)]
    found: list[bytes] = []

    async def read(client: trio.SocketStream) -> None:
        found.append(await read_to_end(client))

    async with trio.open_nursery() as nursery:
        for client in clients:
            nursery.start_soon(read, client)
        server.process.send_signal(signal.SIGTERM)
        if how == "second signal":
            for _ in range(6):
                async with http_client(server.url) as client:
                    while (await client.get("/health")).json() != {"status": "draining"}:
                        await trio.sleep(0.01)
                    refused = await client.post(PATH, json={"prompt": "x"})
                    assert refused.status_code == 503
            server.process.send_signal(signal.SIGINT)
        code, _ = await server.ended()
    assert code == {"drain": 0, "time is over": 3, "second signal": 128 + signal.SIGINT}[how]
    assert len(found) == 8
    for answer in found:
        event = last_event(answer)
        assert event == {} if how == "drain" else event["error"]["code"] == "shutting_down"


async def _clients_of_both(
    server: Server, other: psutil.Process
) -> tuple[list[trio.SocketStream], list[trio.SocketStream]]:
    """At least a dozen clients with streams of more than a minute, and those of them that
    ``other`` has, which are neither all nor none: the system deals them out as it likes."""
    clients: list[trio.SocketStream] = []
    held: list[trio.SocketStream] = []
    while len(clients) < 12 or not 0 < len(held) < len(clients):
        clients.append(await server.stream(max_tokens=8000))
        held = [client for client in clients if _port(client) in _ports_of_clients(other)]
    return clients, held


def _port(client: trio.SocketStream) -> int:
    port: int = client.socket.getsockname()[1]
    return port


def _ports_of_clients(process: psutil.Process) -> set[int]:
    """Return the other ends of its connections."""
    return {each.raddr.port for each in process.net_connections("tcp") if each.raddr}


async def test_a_front_end_that_is_stopped_holds_nobody_else_up(start: Any) -> None:
    server = start(Path("smollm2-135m"), *MOCK, "--shutdown-timeout", "600")
    server.wait_until_it_serves()
    first, second = front_ends(server)
    first.suspend()
    # Half of the clients are for the one that is stopped; the other sees to them.
    for _ in range(8):
        async with http_client(server.url) as client:
            body = {"prompt": "x", "max_tokens": 3}
            assert (await client.post(PATH, json=body)).status_code == 200
    counted = await values(server.url)
    assert counted["trioserve:generation_tokens_total"] == 24
    first.resume()
    await _end(server, "second signal")
    assert not _lives(second)


async def test_a_front_end_that_hangs_is_replaced(start: Any) -> None:
    options = ("--watchdog-timeout", "10", "--log-level", "info", "--log-format", "json")
    server = start(Path("smollm2-135m"), *MOCK, *options)
    server.wait_until_it_serves()
    victim, other = front_ends(server)
    clients, held = await _clients_of_both(server, other)
    victim.suspend()

    async def is_replaced() -> bool:
        found = front_ends(server)
        return victim not in found and len(found) == 2

    await until(is_replaced, within=60)

    async def is_left_alone() -> bool:
        return (await load(server.url))["num_reqs"] == len(held)

    await until(is_left_alone)
    for client in clients:
        if client in held:
            await read_until(client, b"data: {")
        else:
            assert not (await read_to_end(client)).endswith(LAST_CHUNK)
        await client.aclose()
    assert (await values(server.url))["trioserve:front_end_restarts_total"] == 1
    await until(lambda: nothing_runs(server.url))
    server.process.send_signal(signal.SIGTERM)
    code, lines = await server.ended()
    assert code == 0
    events = [json.loads(line) for line in lines.splitlines()]
    (lost,) = [event for event in events if event["event"] == "front end lost"]
    assert (lost["kind"], lost["requests"]) == ("hung", len(clients) - len(held))
    assert "no sign of life within 10 s" in lost["reason"]
    (replaced,) = [event for event in events if event["event"] == "front end replaced"]
    assert (replaced["front_end"], replaced["restarts"]) == (lost["front_end"], 1)


async def test_a_worker_that_dies_is_a_pause_for_all(start: Any) -> None:
    server = start(Path("smollm2-135m"), *MOCK, "--shutdown-timeout", "0.5")
    server.wait_until_it_serves()
    clients = [await server.stream(max_tokens=500) for _ in range(6)]
    worker = await server.worker()
    before = await snapshot(server.url)
    assert before["worker"]["pid"] == worker.pid
    assert before["worker"]["restarts"] == 0
    processes = ["engine", "front end 0", "front end 1"]
    assert [node["name"] for node in before["tasks"]["children"]] == processes
    worker.kill()
    for client in clients:
        answer = await read_until(client, LAST_CHUNK)
        assert answer.endswith(b"data: [DONE]\n\n" + LAST_CHUNK)
        assert b'"finish_reason":"length"' in answer
    assert (await values(server.url))["trioserve:worker_restarts_total"] == 1
    after = await snapshot(server.url)
    assert (after["health"], after["worker"]["restarts"]) == ("ok", 1)
    assert after["worker"]["pid"] not in (None, worker.pid)
    assert "signal 9" in after["worker"]["last_death"]
    await _end(server, "time is over")


async def test_an_engine_process_that_is_killed_takes_all_with_it(start: Any) -> None:
    server = start(Path("smollm2-135m"), *MOCK)
    server.wait_until_it_serves()
    # What service managers send to every process is for the engine's alone.
    for process in server.children():
        process.send_signal(signal.SIGTERM)
    clients = [await server.stream(max_tokens=5000) for _ in range(4)]
    assert len(server.children()) == 3
    server.process.kill()
    with trio.fail_after(60):
        while server.children():
            await trio.sleep(0.01)
        for client in clients:
            # The last event says that it was cut off.
            assert last_event(await read_to_end(client))["error"]


async def test_an_engine_that_fails_ends_every_stream(start: Any) -> None:
    server = start(Path("smollm2-135m"), *MOCK, "--max-worker-restarts", "0")
    server.wait_until_it_serves()
    clients = [await server.stream() for _ in range(4)]
    (await server.worker()).kill()
    found = [last_event(await read_to_end(client)) for client in clients]
    code, error = await server.ended()
    assert [event["error"]["code"] for event in found] == ["engine_error"] * 4
    assert code == 1
    line = error.splitlines()[-1]
    assert line.startswith("trioserve: the engine failed: process ")
    assert "Traceback" not in error


async def test_front_ends_that_die_again_and_again_end_the_server(start: Any) -> None:
    server = start(Path("smollm2-135m"), *MOCK, "--max-worker-restarts", "1")
    server.wait_until_it_serves()
    killed: set[int] = set()
    with trio.fail_after(120):
        while server.process.poll() is None:
            for process in front_ends(server)[-1:]:
                if process.pid not in killed and len(front_ends(server)) == 2:
                    killed.add(process.pid)
                    process.kill()
            await trio.sleep(0.05)
    code, error = await server.ended()
    assert code == 1
    assert "front ends died 2 times: front end" in error.splitlines()[-1]
    assert "Traceback" not in error


async def test_what_keeps_a_front_end_from_serving_is_one_line(start: Any, tmp_path: Path) -> None:
    server = start(
        Path("smollm2-135m"), *MOCK, "--chat-template", str(tmp_path / "there is none.jinja")
    )
    code, error = await server.ended()
    assert code == 1
    line = error.splitlines()[-1]
    assert line.startswith("trioserve: the chat template ")
    assert "Traceback" not in error


async def test_bounds_hold_over_all_front_ends(start: Any) -> None:
    server = start(
        Path("smollm2-135m"),
        *MOCK,
        *("--max-num-seqs", "1", "--max-num-queued-reqs", "8"),
        *("--api-key", "one", "--api-key", "two", "--max-requests-per-key", "5"),
    )
    server.wait_until_it_serves()

    async def open_stream(key: str) -> bytes:
        """Return the first line of the answer; the connection stays open."""
        client = await connect(server.url)
        whole = request(max_tokens=7000)
        head = b"\r\nAuthorization: Bearer " + key.encode() + b"\r\n"
        await client.send_all(whole.replace(b"\r\n", head, 1))
        answer = await read_until(client, b"\r\n\r\n")
        opened.append(client)
        return answer.partition(b"\r\n")[0]

    opened: list[trio.SocketStream] = []
    with trio.fail_after(60):
        # One runs and four wait, which is this key's half of the queue and all that it may have.
        # The other key gets half of the rest.
        admitted = [await open_stream("one") for _ in range(5)]
        refused = [await open_stream("one") for _ in range(6)]
        admitted += [await open_stream("two") for _ in range(2)]
        refused += [await open_stream("two") for _ in range(3)]
    assert [b" 200 " in line for line in admitted] == [True] * 7, admitted
    assert [b" 429 " in line for line in refused] == [True] * 9, refused
    async with http_client(server.url, headers={"Authorization": "Bearer two"}) as client:
        text = (await client.get("/metrics")).text
        assert 'trioserve:http_errors_total{code="key_limit"} 6.0' in text
        assert 'trioserve:http_errors_total{code="queue_full"} 3.0' in text
        for each in opened:
            await each.aclose()

        async def is_idle() -> bool:
            return bool((await client.get("/load")).json()["num_reqs"] == 0)

        await until(is_idle)
        body = {"prompt": "x", "max_tokens": 2}
        assert (await client.post(PATH, json=body)).status_code == 200
    server.process.send_signal(signal.SIGTERM)
    assert await server.ended() == (0, "")
