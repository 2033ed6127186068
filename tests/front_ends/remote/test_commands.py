"""``trioserve front-end`` beside the front ends of its server: the same answers, and both ends."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.test_shutdown_process import Server, last_event, start, tiny
from tests.front_ends.test_server import answers, nothing_runs, until, values
from tests.support.http_stub import http_client, read_to_end
from tests.support.ports import free_port
from trioserve.workers.remote.certificates import make_certificates

__all__ = ["start", "tiny"]

Join = Callable[..., Server]
ADMIN = {"Authorization": "Bearer admin"}


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tls")
    make_certificates(folder)
    return str(folder)


@pytest.fixture
def join(tmp_path: Path, tls: str) -> Iterator[Join]:
    """Starts front ends, which are killed at the end."""
    front_ends: list[Server] = []

    def join(model: Path, address: str) -> Server:
        command = [sys.executable, "-m", "trioserve", "front-end", str(model)]
        command += ["--join", address, "--tls", tls, "--port", str(free_port())]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdout=pipe, stderr=pipe)
        front_ends.append(Server(process, tmp_path))
        return front_ends[-1]

    yield join
    for each in front_ends:
        each.process.kill()
        each.process.communicate()


def options_of(address: str, tls: str) -> list[str]:
    """Return the options of a server with front ends of its own and of other hosts."""
    join = ["--worker-listen", address, "--worker-tls", tls, "--worker-link-timeout", "2"]
    return ["--api-server-count", "2", *join, "--admin-api-key", "admin"]


async def test_the_answers_are_those_of_the_engines_own_front_ends(
    tiny: Path, start: Any, join: Join, tls: str
) -> None:
    address = f"127.0.0.1:{free_port()}"
    server = start(tiny, "--dtype", "float32", *options_of(address, tls))
    front_end = join(tiny, address)
    server.wait_until_it_serves()
    front_end.wait_until_it_serves()
    expected = await answers(server.url)
    assert await answers(front_end.url) == expected
    for url in (server.url, front_end.url):
        counted = await values(url)
        assert counted["trioserve:e2e_request_latency_seconds_count"] == 26
        assert counted["trioserve:request_rejections_total"] == 4
    # An operator's call acts on the engine, whichever front end it comes over.
    async with http_client(front_end.url) as near, http_client(server.url) as far:
        assert (await near.post("/pause_generation", json={}, headers=ADMIN)).status_code == 200
        assert (await far.get("/is_paused", headers=ADMIN)).json() == {"is_paused": True}
        assert (await far.post("/continue_generation", json={}, headers=ADMIN)).status_code == 200
    stream = await front_end.stream(max_tokens=200)
    front_end.process.send_signal(signal.SIGTERM)
    assert last_event(await read_to_end(stream)) == {}
    assert (await front_end.ended())[0] == 0
    server.process.send_signal(signal.SIGTERM)
    assert (await server.ended())[0] == 0


async def test_either_side_dies_and_the_other_goes_on(
    tiny: Path, start: Any, join: Join, tls: str
) -> None:
    address = f"127.0.0.1:{free_port()}"
    mock = (*options_of(address, tls), "--mock-worker", "10ms")
    server, front_end = start(tiny, *mock), join(tiny, address)
    server.wait_until_it_serves()
    front_end.wait_until_it_serves()
    stream = await front_end.stream()
    server.process.kill()
    assert last_event(await read_to_end(stream))["error"]["code"] == "shutting_down"
    assert front_end.process.poll() is None
    server = start(tiny, *mock)
    server.wait_until_it_serves()

    async def listens() -> bool:
        with contextlib.suppress(httpx.TransportError):
            async with http_client(front_end.url) as client:
                return (await client.get("/health")).json() == {"status": "ok"}
        return False

    await until(listens)
    stream = await front_end.stream()
    assert not await nothing_runs(server.url)
    front_end.process.kill()
    await until(lambda: nothing_runs(server.url))
    await stream.aclose()
