"""Servers as subprocesses: started, waited for, measured and stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import trio

from trioserve.load import Target, over_tcp

__all__ = ["MODEL", "Running", "Server", "ServerFailed", "family", "running", "trioserve_server"]

MODEL = "smollm2-135m"

_START_TIMEOUT = 300.0
_STOP_TIMEOUT = 20.0
_HEALTH_REQUEST = b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n"


class ServerFailed(Exception):
    """A server died, or didn't become healthy in time; its last lines are in the message."""


@attrs.frozen(kw_only=True)
class Server:
    """How to start one server and what its requests say.

    ``argv`` gets the port that it is to listen on; ``fields`` go into every request's body.
    """

    name: str
    argv: Callable[[int], list[str]]
    fields: Mapping[str, Any]
    versions: Mapping[str, str]
    path: str = "/v1/completions"
    env: Mapping[str, str] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Running:
    """A healthy server."""

    server: Server
    target: Target
    port: int
    process: trio.Process

    def peak_memory_bytes(self) -> int:
        """The most memory held by each process of the server, added up (Linux only)."""
        return sum(_peak_of(pid) for pid in family(self.process.pid))


def trioserve_server(dtype: str, versions: Mapping[str, str]) -> Server:
    """This project's server, of this very tree, with the default model."""
    return Server(
        name="trioserve",
        argv=lambda port: [
            *(sys.executable, "-m", "trioserve", "serve", MODEL),
            *("--port", str(port), "--dtype", dtype, "--log-level", "warning"),
        ],
        fields={
            "model": MODEL,
            "temperature": 0,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        },
        versions=versions,
    )


@contextlib.asynccontextmanager
async def running(server: Server, log: Path) -> AsyncIterator[Running]:
    """Start ``server``, its output going to ``log``; healthy inside the block, gone after it.

    Raises:
        ServerFailed: it died or didn't become healthy in time.
    """
    port = _free_port()
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
                await trio.sleep(0.2)
        if patience.cancelled_caught or process.returncode is not None:
            tail = await trio.Path(log).read_text(errors="replace")
            raise ServerFailed(f"{server.name} didn't start:\n{tail[-2000:]}")
        target = Target(
            connect=over_tcp(f"http://127.0.0.1:{port}"), path=server.path, fields=server.fields
        )
        yield Running(server=server, target=target, port=port, process=process)
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


def family(ancestor: int) -> list[int]:
    """A process and all that descend from it; a worker may be in a session of its own."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # The name before the last parenthesis may hold anything, spaces too.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    family = [ancestor]
    for member in family:
        family += children.get(member, [])
    return family


def _peak_of(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
