"""Microseconds of server CPU for each event of a stream: ``python -m bench.front_end.sse``.

This server and uvicorn are started once. In every round and at every number of streams they are
measured one after the other, while the others wait; the first one changes. Each stream gets 50
tokens a second, each of which is an event of its own. The client runs on a core of its own and only
counts. A ratio is the median, over the rounds, of this server's CPU time per event by the peer's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import attrs
import trio

from bench.peers.environments import installed_versions, python_environment
from bench.report import Made, Verdict, markdown, own_versions, run_script
from bench.servers import Server, running

_FOLDER = Path(__file__).parent
_PATH = "/v1/chat/completions"
_FIELDS = {"model": "fake", "stream": True, "messages": [{"role": "user", "content": "hello"}]}
_PEERS = {
    "uvicorn h11": ("raw", "asyncio", "h11"),
    "starlette on uvicorn h11": ("framework", "asyncio", "h11"),
    "uvicorn uvloop httptools": ("raw", "uvloop", "httptools"),
}


@attrs.frozen
class Contender:
    """A server over HTTP/1.1, or over so many connections of HTTP/2."""

    name: str
    server: Server
    connections: int = 0


@attrs.frozen(kw_only=True)
class Window:
    """Some seconds of one server, and the CPU that it used in them."""

    server: str
    round: int
    streams: int
    events: int
    tokens: int
    seconds: float
    cpu_seconds: float

    @property
    def microseconds(self) -> float:
        """The CPU time for each event."""
        return self.cpu_seconds / self.events * 1e6


def _contenders(options: argparse.Namespace) -> list[Contender]:
    def server(name: str, argv: list[str], versions: Mapping[str, str]) -> Server:
        pinned = ["taskset", "-c", str(options.server_core), *argv]
        return Server(
            name=name,
            argv=lambda port: [part.format(port=port) for part in pinned],
            fields=_FIELDS,
            versions=versions,
            path=_PATH,
            env={"BENCH_INTERVAL": str(1 / options.rate)},
        )

    argv = [sys.executable, "-m", "bench.front_end.sse_server", "{port}", str(1 / options.rate)]
    own = server("trioserve", argv, own_versions())
    found = [Contender("trioserve", own), Contender("trioserve HTTP/2", own, connections=4)]
    if options.alone:
        return found
    python = python_environment("uvicorn")
    packages = ("uvicorn", "h11", "starlette", "uvloop", "httptools")
    versions = installed_versions(python, *packages)
    for name, (app, loop, http) in _PEERS.items():
        argv = [str(python), "-m", "uvicorn", f"sse_peers:{app}", "--app-dir", str(_FOLDER)]
        argv += ["--factory"] if app == "framework" else []
        argv += ["--port", "{port}", "--loop", loop, "--http", http]
        argv += ["--log-level", "warning", "--no-access-log"]
        found.append(Contender(name, server(name, argv, versions)))
    return found


async def _window(
    one: Contender, pid: int, port: int, streams: int, options: Any
) -> dict[str, Any]:
    connections = min(max(one.connections, -(-streams // 100)), streams) if one.connections else 0
    job = {
        **{"pid": pid, "port": port, "streams": streams, "connections": connections},
        **{"path": _PATH, "fields": _FIELDS, "text": " token"},
        **{"settle": options.settle, "seconds": options.seconds},
    }
    client = [sys.executable, str(_FOLDER / "sse_client.py"), json.dumps(job)]
    pinned = ["taskset", "-c", str(options.client_core), *client]
    return dict(json.loads((await trio.run_process(pinned, capture_stdout=True)).stdout))


async def measure(options: argparse.Namespace) -> Made:
    """Return a table of medians, and the verdict at 256 streams."""
    contenders, windows = _contenders(options), list[Window]()
    async with AsyncExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {each.server.name: each.server for each in contenders}
        started = {
            name: await stack.enter_async_context(running(server, logs / name))
            for name, server in servers.items()
        }
        for number in range(options.rounds):
            turn = number % len(contenders)
            for streams in options.streams:
                for each in contenders[turn:] + contenders[:turn]:
                    up = started[each.server.name]
                    found = await _window(each, up.process.pid, up.port, streams, options)
                    windows.append(Window(server=each.name, round=number, streams=streams, **found))
                    print(f"{windows[-1]}", file=sys.stderr, flush=True)
    facts = {
        "versions": {name: dict(server.versions) for name, server in servers.items()},
        "verdicts": [attrs.asdict(verdict) for verdict in verdicts(windows)],
    }
    return Made(table(windows), facts)


def _of(windows: Sequence[Window], server: str, streams: int) -> list[Window]:
    chosen = [w for w in windows if w.server == server and w.streams == streams]
    return sorted(chosen, key=lambda window: window.round)


def ratio(windows: Sequence[Window], server: str, streams: int) -> float:
    """Return the first server's CPU time per event by another's."""
    pairs = zip(*(_of(windows, name, streams) for name in (windows[0].server, server)), strict=True)
    return statistics.median(ours.microseconds / theirs.microseconds for ours, theirs in pairs)


def verdicts(windows: Sequence[Window]) -> list[Verdict]:
    """Hold an event's cost at 256 streams to that of uvicorn with h11."""
    streams, peer = 256, "uvicorn h11"
    if not _of(windows, peer, streams):
        return []
    what = f"µs of CPU per SSE event, {streams} streams"
    bounds = {"bound": 1.3, "moonshot": 1.0, "at_most": True}
    reached = ratio(windows, peer, streams)
    return [Verdict(what=what, against="uvicorn with h11", reached=reached, **bounds)]


def table(windows: Sequence[Window]) -> str:
    """Return the medians of the rounds, their spread, and the ratios."""
    first, lines = windows[0].server, []
    for streams in sorted({window.streams for window in windows}):
        for server in dict.fromkeys(window.server for window in windows):
            own = _of(windows, server, streams)
            rounds = [window.microseconds for window in own]
            lines.append(
                [
                    *(streams, server, f"{statistics.median(rounds):.1f}"),
                    f"{min(rounds):.1f} to {max(rounds):.1f}",
                    "" if server == first else f"{ratio(windows, server, streams):.2f}",
                    f"{statistics.median(w.events / w.seconds for w in own):.0f}",
                    f"{statistics.median(w.tokens / w.events for w in own):.2f}",
                ]
            )
    heads = ["streams", "server", "µs of CPU per event", "least to most", f"{first} / this"]
    return markdown([*heads, "events/s", "tokens per event"], lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    return run_script(
        *("sse", measure, arguments),
        **{"streams": [1, 32, 256, 1000], "rounds": 3, "rate": 50.0, "seconds": 3.0},
        **{"settle": 0.5, "server_core": 0, "client_core": 1, "alone": False},
    )


if __name__ == "__main__":
    sys.exit(main())
