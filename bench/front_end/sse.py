"""Microseconds of server CPU for each event of a stream: ``python -m bench.front_end.sse``.

This server and uvicorn are started once. In every round and at every number of streams they are
measured one after the other, while the others wait; every other round goes backwards. Each stream
gets 50 tokens a second, each of which is an event of its own. The client runs on a core of its own
and only counts. A ratio is the median, over the rounds, of this server's CPU time per event by the
peer's.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import attrs
import trio

from bench.peers.environments import installed_versions, python_environment
from bench.report import Made, Verdict, in_turns, markdown, own_versions, script
from bench.servers import Running, Server, running

_PATH = "/v1/chat/completions"
_FIELDS = {"model": "fake", "stream": True, "messages": [{"role": "user", "content": "hello"}]}
_OWN, _HTTP2 = "trioserve", "trioserve HTTP/2"
_PEERS = {"uvicorn h11": ("asyncio", "h11"), "uvicorn uvloop httptools": ("uvloop", "httptools")}
"""The event loop and the HTTP parser of each."""


@attrs.frozen(kw_only=True)
class Window:
    """Some seconds of one server, and the CPU that it used in them."""

    events: int
    tokens: int
    seconds: float
    cpu_seconds: float

    @property
    def microseconds(self) -> float:
        """The CPU time for each event."""
        return self.cpu_seconds / self.events * 1e6


Windows = dict[tuple[int, str], list[Window]]
"""The rounds of each number of streams and server."""


def _server(name: str, argv: Sequence[str], versions: Mapping[str, str]) -> Server:
    pinned = ["taskset", "-c", str(min(os.sched_getaffinity(0))), *argv]
    return Server(
        name=name,
        argv=lambda port: [*pinned, str(port)],
        fields=_FIELDS,
        versions=versions,
        path=_PATH,
    )


def _servers() -> list[Server]:
    own = _server(_OWN, [sys.executable, "-m", "bench.front_end.sse_server"], own_versions())
    python = python_environment("uvicorn")
    packages = ("uvicorn", "h11", "uvloop", "httptools")
    versions, found = installed_versions(python, *packages), [own]
    for name, (loop, http) in _PEERS.items():
        argv = [str(python), "-m", "uvicorn", "sse_peers:raw"]
        argv += ["--app-dir", str(Path(__file__).parent)]
        argv += ["--loop", loop, "--http", http, "--log-level", "warning", "--no-access-log"]
        found.append(_server(name, [*argv, "--port"], versions))
    return found


async def _window(up: Running, streams: int, seconds: float, *, http2: bool) -> Window:
    """Measure one server, whose connections have at most 100 streams of HTTP/2 each."""
    job = {
        **{"pid": up.process.pid, "port": up.port, "path": _PATH, "fields": _FIELDS},
        **{"streams": streams, "connections": min(max(4, -(-streams // 100)), streams) * http2},
        **{"text": " token", "seconds": seconds},
    }
    client = [sys.executable, "-m", "bench.front_end.sse_client", json.dumps(job)]
    pinned = ["taskset", "-c", str(max(os.sched_getaffinity(0))), *client]
    done = await trio.run_process(pinned, capture_stdout=True)
    return Window(**json.loads(done.stdout))


def ratio(windows: Windows, streams: int, peer: str) -> float:
    """Return this server's CPU time per event by another's."""
    pairs = zip(windows[streams, _OWN], windows[streams, peer], strict=True)
    return statistics.median(ours.microseconds / theirs.microseconds for ours, theirs in pairs)


def verdicts(windows: Windows) -> list[Verdict]:
    """Hold an event's cost at 256 streams to that of uvicorn with h11."""
    streams, peer = 256, "uvicorn h11"
    if (streams, peer) not in windows:
        return []
    what = f"µs of CPU per SSE event, {streams} streams"
    bounds = {"bound": 1.3, "moonshot": 1.0, "at_most": True}
    reached = ratio(windows, streams, peer)
    return [Verdict(what=what, against="uvicorn with h11", reached=reached, **bounds)]


def table(windows: Windows) -> str:
    """Return the medians of the rounds, their spread, and the ratios."""
    lines = []
    for (streams, server), rounds in windows.items():
        costs = [window.microseconds for window in rounds]
        lines.append(
            [
                *(streams, server, f"{statistics.median(costs):.1f}"),
                f"{min(costs):.1f} to {max(costs):.1f}",
                "" if server == _OWN else f"{ratio(windows, streams, server):.2f}",
                f"{statistics.median(one.events / one.seconds for one in rounds):.0f}",
                f"{statistics.median(one.tokens / one.events for one in rounds):.2f}",
            ]
        )
    heads = ["streams", "server", "µs of CPU per event", "least to most", f"{_OWN} / this"]
    return markdown([*heads, "events/s", "tokens per event"], lines)


@script
async def measure(
    *, streams: Sequence[int] = (1, 32, 256, 1000), rounds: int = 3, seconds: float = 3.0
) -> Made:
    """Return a table of medians, and the verdict at 256 streams."""
    servers, windows = _servers(), Windows()
    async with AsyncExitStack() as stack:
        up = {one.name: await stack.enter_async_context(running(one)) for one in servers}
        up = {_OWN: up[_OWN], _HTTP2: up[_OWN], **up}
        for _, (count, name) in in_turns(rounds, list(itertools.product(sorted(streams), up))):
            found = await _window(up[name], count, seconds, http2=name == _HTTP2)
            windows.setdefault((count, name), []).append(found)
    facts = {
        "versions": {server.name: dict(server.versions) for server in servers},
        "verdicts": [attrs.asdict(verdict) for verdict in verdicts(windows)],
    }
    return Made(table(windows), facts)
