"""Servers as subprocesses: started, waited for, measured and stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import trio

from bench.family import Family
from trioserve.load import Target, over_tcp

__all__ = ["MODEL", "Running", "Server", "ServerFailed", "running"]

MODEL = "smollm2-135m"

_START_TIMEOUT = 600.0
_STOP_TIMEOUT = 20.0
# Seconds; what is added to a time of starting is half of it on average.
_ASK_AGAIN = 0.02
_HEALTH_REQUEST = b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n"


class ServerFailed(Exception):
    """A server died, or didn't become healthy in time; its last lines are in the message."""


@attrs.frozen(kw_only=True)
class Server:
    """How to start one server and what its requests say.

    ``argv`` gets the port that it is to listen on; ``fields`` go into every request's body.
    ``format`` is the number format of the weights, as comparisons call it.
    """

    name: str
    argv: Callable[[int], list[str]]
    fields: Mapping[str, Any]
    versions: Mapping[str, str]
    path: str = "/v1/completions"
    env: Mapping[str, str] = attrs.field(factory=dict)
    format: str = ""

    @property
    def title(self) -> str:
        """As progress and tables call it."""
        return f"{self.name} {self.format}".rstrip()


@attrs.frozen(kw_only=True)
class Running:
    """A healthy server; it was ``started`` at that time of trio's clock."""

    server: Server
    target: Target
    port: int
    process: trio.Process
    started: float

    @property
    def family(self) -> Family:
        """All of its processes."""
        return Family(self.process.pid)


@contextlib.asynccontextmanager
async def running(server: Server, log: Path) -> AsyncIterator[Running]:
    """Start ``server``, its output going to ``log``; healthy inside the block, gone after it.

    Raises:
        ServerFailed: it died or didn't become healthy in time.
    """
    port = _free_port()
    started = trio.current_time()
    async with await trio.open_file(log, "wb") as output:
        process = await trio.lowlevel.open_process(
            server.argv(port),
            stdout=output.wrapped.fileno(),
            stderr=subprocess.STDOUT,
            env={**os.environ, **server.env},
            start_new_session=True,
        )
    try:
        with trio.move_on_after(_START_TIMEOUT) as patience:
            while not await _healthy(port):
                if process.poll() is not None:
                    break
                await trio.sleep(_ASK_AGAIN)
        if patience.cancelled_caught or process.returncode is not None:
            tail = await trio.Path(log).read_text(errors="replace")
            raise ServerFailed(f"{server.name} didn't start:\n{tail[-2000:]}")
        target = Target(
            connect=over_tcp(f"http://127.0.0.1:{port}"), path=server.path, fields=server.fields
        )
        yield Running(server=server, target=target, port=port, process=process, started=started)
    finally:
        with trio.CancelScope(shield=True):
            await _stop(process)


async def _stop(process: trio.Process) -> None:
    for last_word in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, last_word)
        with trio.move_on_after(_STOP_TIMEOUT):
            await process.wait()
            # The group may outlive its leader by a worker; nothing of it may stay.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return


async def _healthy(port: int) -> bool:
    try:
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(_HEALTH_REQUEST)
            return b" 200 " in await stream.receive_some(64)
    except (OSError, trio.BrokenResourceError):
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
