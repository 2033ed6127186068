"""Microseconds of server CPU for each event of a stream, beside uvicorn's: ``python -m bench.sse``.

All servers are started once. In every round and at every number of streams they are measured one
after the other, while the others wait; who goes first changes. Each stream gets 50 tokens a second,
each of which is an event of its own. The client runs on a core of its own and only counts. A ratio
is the median, over the rounds, of this server's CPU time per event by the peer's.

With ``--requests`` an event is a whole request: accepted, read, checked and answered with one
token. The peers check nothing of it, and their only route is the one that is asked for.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import attrs
import trio

from bench.report import own_versions
from bench.servers import Server, running
from bench.sse.figures import Window, ratios, save, table, verdicts

_FOLDER = Path(__file__).parent
_KEPT = _FOLDER.parent / ".peers"
_RESULTS = _FOLDER.parent / "results"
_REQUIREMENTS = _FOLDER / "requirements.txt"
_PATH = "/v1/chat/completions"
_FIELDS = {"model": "fake", "stream": True, "messages": [{"role": "user", "content": "hello"}]}
_ASK_VERSIONS = """
import importlib.metadata, json, sys
print(json.dumps({"python": sys.version.split()[0], **{name: importlib.metadata.version(name)
    for name in ("uvicorn", "h11", "starlette", "uvloop", "httptools")}}))
"""


@attrs.frozen
class Contender:
    """A server as it is measured: over HTTP/1.1, or over so many connections of HTTP/2."""

    name: str
    server: Server
    connections: int = 0


def _environment() -> str:
    """The Python of the peers' environment, made anew when its requirements have changed."""
    folder = _KEPT / "uvicorn"
    python = folder / "bin" / "python"
    note = folder / "installed.txt"
    wanted = f"{sys.version}\n{_REQUIREMENTS.read_text()}"
    if not (note.exists() and note.read_text() == wanted):
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--requirement", str(_REQUIREMENTS)], check=True)
        note.write_text(wanted)
    return str(python)


def _contenders(options: argparse.Namespace) -> list[Contender]:
    interval = 1 / options.rate
    own = _server(
        "trioserve",
        [sys.executable, "-m", "bench.sse.server", "{port}", str(interval)],
        own_versions(),
        options,
    )
    contenders = [Contender("trioserve", own)]
    if not options.requests:
        contenders.append(Contender("trioserve HTTP/2", own, connections=4))
    if options.alone:
        return contenders
    python = _environment()
    asked = subprocess.run([python, "-c", _ASK_VERSIONS], check=True, capture_output=True)
    versions = json.loads(asked.stdout)
    for name, app, how in (
        ("uvicorn h11", "raw", ("asyncio", "h11")),
        ("starlette on uvicorn h11", "framework", ("asyncio", "h11")),
        ("uvicorn uvloop httptools", "raw", ("uvloop", "httptools")),
    ):
        argv = [python, "-m", "uvicorn", f"peer_app:{app}", "--app-dir", str(_FOLDER)]
        argv += ["--factory"] if app == "framework" else []
        argv += ["--port", "{port}", "--loop", how[0], "--http", how[1]]
        argv += ["--log-level", "warning", "--no-access-log"]
        contenders.append(Contender(name, _server(name, argv, versions, options)))
    return contenders


def _server(
    name: str, argv: list[str], versions: Mapping[str, str], options: argparse.Namespace
) -> Server:
    pinned = ["taskset", "-c", str(options.server_core), *argv]
    return Server(
        name=name,
        argv=lambda port: [part.format(port=port) for part in pinned],
        fields=_FIELDS,
        versions=versions,
        path=_PATH,
        env={"BENCH_INTERVAL": str(1 / options.rate)},
    )


async def _window(
    contender: Contender, pid: int, port: int, streams: int, options: argparse.Namespace
) -> dict[str, Any]:
    job = {
        "pid": pid,
        "port": port,
        "streams": streams,
        "connections": contender.connections
        and min(max(contender.connections, -(-streams // 100)), streams),
        "path": _PATH,
        "fields": {**_FIELDS, "max_tokens": 1} if options.requests else _FIELDS,
        "requests": options.requests,
        "text": " token",
        "settle": options.settle,
        "seconds": options.seconds,
    }
    client = [sys.executable, str(_FOLDER / "client.py"), json.dumps(job)]
    pinned = ["taskset", "-c", str(options.client_core), *client]
    done = await trio.run_process(pinned, capture_stdout=True)
    return dict(json.loads(done.stdout))


async def _measure(contenders: list[Contender], options: argparse.Namespace) -> list[Window]:
    windows: list[Window] = []
    logs = _RESULTS / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        servers = {each.server.name: each.server for each in contenders}
        started = {
            name: await stack.enter_async_context(running(server, logs / f"sse-{name}.log"))
            for name, server in servers.items()
        }
        for number in range(options.rounds):
            turn = number % len(contenders)
            for streams in options.streams:
                for each in contenders[turn:] + contenders[:turn]:
                    server = started[each.server.name]
                    found = await _window(each, server.process.pid, server.port, streams, options)
                    window = Window(server=each.name, round=number, streams=streams, **found)
                    windows.append(window)
                    print(window.line, file=sys.stderr, flush=True)
    return windows


def main() -> int:
    """Measure, print the table and save everything."""
    parser = argparse.ArgumentParser(prog="python -m bench.sse", description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+")
    parser.add_argument(
        "--requests",
        action="store_true",
        help="measure whole requests for one token, one after the other on each connection",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=50.0, help="events a second, of each stream")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each window")
    parser.add_argument("--settle", type=float, default=0.5, help="seconds before each window")
    parser.add_argument("--server-core", type=int, default=0)
    parser.add_argument("--client-core", type=int, default=1)
    parser.add_argument("--alone", action="store_true", help="without the peers")
    parser.add_argument("--results", type=Path, default=_RESULTS)
    options = parser.parse_args()
    if options.streams is None:
        options.streams = [64] if options.requests else [1, 32, 256, 1000]
    contenders = _contenders(options)
    windows = trio.run(_measure, contenders, options)
    print(table(windows))
    versions = {each.server.name: dict(each.server.versions) for each in contenders}
    facts = {
        "options": {name: str(value) for name, value in vars(options).items()},
        "versions": versions,
        "ratios": ratios(windows),
        "table": table(windows),
        "verdicts": [attrs.asdict(verdict) for verdict in verdicts(windows)],
    }
    print(f"saved {save(options.results, windows, facts)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
