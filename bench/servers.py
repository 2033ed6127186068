"""Servers as subprocesses: started, waited for, measured and stopped."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import tempfile
import urllib.request
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import tokenizers
import trio

from trioserve.load import CountedTexts, Lengths, Target, over_tcp, random_prompts
from trioserve.model_files import locate, open_model

MODEL = "smollm2-135m"
_START_TIMEOUT, _STOP_TIMEOUT = 600.0, 20.0
_ASK_AGAIN = 0.02  # seconds; a start appears longer by half of it on average


class ServerFailed(Exception):
    """A server died, or didn't become healthy in time; the message has its last lines."""


@attrs.frozen(kw_only=True)
class Server:
    """The command of one server, and the fields of every request to it.

    ``argv`` gets the port to listen on. ``format`` is the number format of the weights.
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
        """The server's name in tables."""
        return f"{self.name} {self.format}".rstrip()


@attrs.frozen(kw_only=True)
class Running:
    """A healthy server, ``started`` at that time of trio's clock."""

    server: Server
    target: Target
    port: int
    process: trio.Process
    started: float

    @property
    def family(self) -> Family:
        """All processes of the server."""
        return Family(self.process.pid)


@attrs.frozen
class Family:
    """A process and its descendants, if these count, found anew at each question (Linux only)."""

    pid: int
    with_children: bool = True

    def members(self) -> list[Any]:
        """Return the processes, workers in sessions of their own among them."""
        import psutil  # not on a rented machine

        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.pid)
            return [parent, *(parent.children(recursive=True) if self.with_children else ())]
        return []

    def _sum(self, figure: Callable[[Any], float]) -> float:
        import psutil

        total = 0.0
        for member in self.members():
            with contextlib.suppress(psutil.Error):
                total += figure(member)
        return total

    def cpu_seconds(self) -> float:
        """Return the CPU time of the processes and of their ended children."""
        return self._sum(lambda process: sum(process.cpu_times()[:4]))

    def pss_bytes(self, kind: str = "Pss") -> int:
        """Return the memory, of which a shared page counts with each process's part.

        ``kind`` is the kernel's name: ``Pss``, ``Pss_Anon`` (written), ``Pss_File`` (mapped).
        """
        return 1024 * int(self._sum(lambda one: _kib(one.pid, "smaps_rollup", f"{kind}:")))

    def peak_resident_bytes(self) -> int:
        """Return the sum of the most memory that each process held."""
        return 1024 * int(self._sum(lambda one: _kib(one.pid, "status", "VmHWM:")))


def _kib(pid: int, file: str, name: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1])
    return 0


@contextlib.asynccontextmanager
async def running(server: Server) -> AsyncIterator[Running]:
    """Start ``server``: healthy inside the block, gone after it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    started = trio.current_time()
    with tempfile.TemporaryFile() as log:
        process = await trio.lowlevel.open_process(
            server.argv(port),
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **server.env},
            start_new_session=True,
        )
        try:
            with trio.move_on_after(_START_TIMEOUT) as patience:
                while process.poll() is None and not await _healthy(port):
                    await trio.sleep(_ASK_AGAIN)
            if patience.cancelled_caught or process.returncode is not None:
                log.seek(0)
                tail = log.read()[-2000:].decode(errors="replace")
                raise ServerFailed(f"{server.name} didn't start:\n{tail}")
            connect = over_tcp(f"http://127.0.0.1:{port}")
            target = Target(connect=connect, path=server.path, fields=server.fields)
            yield Running(server=server, target=target, port=port, process=process, started=started)
        finally:
            with trio.CancelScope(shield=True):
                await _stop(process)


async def _stop(process: trio.Process) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with trio.move_on_after(_STOP_TIMEOUT):
            await process.wait()
            # The group may outlive its leader by a worker; nothing of it may stay.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return


async def get(port: int, path: str) -> tuple[int, str]:
    """Return status and body of a GET."""
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
        answer = b"".join([bytes(part) async for part in stream])
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body.decode()


def post(port: int, path: str, body: Mapping[str, Any]) -> Any:
    """Return the JSON of a POST; blocks."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


async def _healthy(port: int) -> bool:
    try:
        return (await get(port, "/health"))[0] == 200
    except (OSError, trio.BrokenResourceError, IndexError):
        return False


@functools.cache
def tokenizer() -> tokenizers.Tokenizer:
    """Return the default model's tokenizer, read once."""
    return open_model(locate(MODEL)).load_tokenizer()


def exact_prompts(count: int, tokens: int, seed: object) -> list[str]:
    """Return ``count`` texts of random English words, of ``tokens`` ids each.

    Another ``seed`` gives other texts; a server keeps what it has computed, so each purpose has a
    seed of its own.
    """
    lengths, number = Lengths(input_tokens=tokens, output_tokens=1), zlib.crc32(f"{seed}".encode())
    work = random_prompts(CountedTexts(tokenizer()), count, lengths, seed=number)
    return [str(one.turns[0].prompt) for one in work]
