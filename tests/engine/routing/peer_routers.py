"""Routers of other projects beside this one's: ``python -m tests.engine.routing.peer_routers``.

The programs are the real ones, in environments of their own. Behind them are servers over the
simulated workers of :mod:`tests.engine.routing.replay`, at whole traces. The simulation's time
stands still while a router chooses: a request is sent when all that ended before its arrival has
ended at the router, too. So a router has the same view as in real time, its own time isn't counted,
and a busy machine doesn't change the figures. As a replay takes about a tenth of the trace's time,
the routers' trees are tidied ten times as often as by default.

The policies of this project choose among the same workers without a program in between. The first
requests also go through ``trioserve route``; its figures and those of ``predicted`` are saved
beside the table.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import h11
import trio

from bench.peers.environments import installed_versions, python_environment
from bench.report import Made, Verdict, markdown, script
from bench.servers import get
from tests.engine.routing.mock_servers import MODEL, MockServers, events_of
from tests.engine.routing.replay import (
    BLOCK,
    POLICIES,
    Asked,
    Simulation,
    Worker,
    endless_hits,
    read,
    replay,
    speed_for,
)
from tests.support.ports import free_port

CHARACTERS = 4
"""Characters of a token: routers see texts."""
EVICTION = 12
"""Seconds between evictions of the routers' trees, a tenth of their default."""
FACTOR = 1.3
"""Times by which the best other router is to be slower."""
OWN = "predicted"
_OTHERS = ("round_robin", "least_loaded", "prefix hash")
"""Policies of this project."""
_SETTLED, _TIMEOUT = 0.003, 600.0
"""Seconds in which a router has read its feeds, and those in which it must answer.

The second are many, so that a run may be stopped for a while.
"""


@attrs.frozen(kw_only=True)
class RouterProgram:
    """The program of a router: its command for a port and servers, and its versions."""

    argv: Callable[[int, Sequence[str]], list[str]]
    versions: dict[str, str]


def _peer(package: str, *command: str) -> RouterProgram:
    """Return a router in an environment of its own, with its cache-aware policy."""
    python = python_environment(package)
    program = [str(python.parent / command[0]), *command[1:]]

    def argv(port: int, urls: Sequence[str]) -> list[str]:
        options = ["--policy", "cache_aware", "--eviction-interval-secs", str(EVICTION)]
        ports = ["--port", str(port), "--prometheus-port", str(free_port())]
        return [*program, "--worker-urls", *urls, "--host", "127.0.0.1", *ports, *options]

    return RouterProgram(argv=argv, versions=installed_versions(python, package))


def own_router(port: int, urls: Sequence[str]) -> list[str]:
    """Return the command of this project's router of servers."""
    key = ["--upstream-admin-api-key", "mock", "--upstream-timeout", str(_TIMEOUT)]
    command = [sys.executable, "-m", "trioserve", "route", *urls, *key, "--port", str(port)]
    return [*command, "--log-level", "warning"]


ROUTERS: dict[str, Callable[[], RouterProgram]] = {
    "vllm-router": lambda: _peer("vllm-router", "vllm-router"),
    "sglang-router": lambda: _peer("sglang-router", "smg", "launch"),
    "smg": lambda: _peer("smg", "smg", "launch"),
}
"""The programs by their names on PyPI."""


@attrs.define(eq=False)
class _Answer:
    """The answer to a request, as its client gets it."""

    begun: trio.Event = attrs.field(factory=trio.Event)
    ended: trio.Event = attrs.field(factory=trio.Event)


async def replay_through(
    argv: Callable[[int, Sequence[str]], list[str]],
    trace: Sequence[Asked],
    count: int,
    settle: float = 5.0,
) -> dict[str, float]:
    """Return the figures of the requests on ``count`` servers behind a router's program.

    Args:
        argv: Its command, for its port and the servers' URLs.
        trace: The requests.
        count: Number of servers.
        settle: Seconds in which it finds all servers once it is healthy.
    """
    simulation = Simulation(trace, [Worker() for _ in range(count)])
    servers = MockServers(trace, simulation.workers)
    answers: dict[int, _Answer] = {}

    async def end(indices: Sequence[int]) -> None:
        """End requests at the servers; return when the clients know it."""
        for index in indices:
            servers.end(index)
        for index in indices:
            await answers.pop(index).ended.wait()

    async with trio.open_nursery() as nursery:
        await nursery.start(servers.serve)
        port = free_port()
        urls = [f"http://127.0.0.1:{each}" for each in servers.ports]
        await nursery.start(run_program, argv(port, urls))
        await _until_healthy(port)
        await trio.sleep(settle)
        for index, asked in enumerate(trace):
            with trio.fail_after(_TIMEOUT):
                await end(simulation.until(asked.at))
                if servers.has_readers:
                    await servers.publish()
                    await trio.sleep(_SETTLED)
                answer = answers[index] = _Answer()
                nursery.start_soon(_ask, port, index, asked, answer)
                await answer.begun.wait()
            simulation.add(index, servers.arrived[index])
        await end(simulation.until(math.inf))
        nursery.cancel_scope.cancel()
    return simulation.figures()


async def _ask(port: int, index: int, asked: Asked, answer: _Answer) -> None:
    """Send a request, and read its answer to the end."""
    body = json.dumps(
        {
            "model": MODEL,
            "prompt": text_of(asked),
            "max_tokens": asked.output,
            "stream": True,
            "seed": index,
        }
    ).encode()
    wire = h11.Connection(h11.CLIENT)
    head = [
        ("host", f"127.0.0.1:{port}"), ("content-type", "application/json"),
        ("content-length", str(len(body))), ("connection", "close"),
    ]  # fmt: skip
    request = h11.Request(method="POST", target="/v1/completions", headers=head)
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        parts = (request, h11.Data(body), h11.EndOfMessage())
        await stream.send_all(b"".join(wire.send(each) or b"" for each in parts))
        async for event in events_of(stream, wire):
            if isinstance(event, h11.Response):
                if event.status_code != 200:
                    raise RuntimeError(f"request {index} was answered with {event.status_code}")
                answer.begun.set()
    answer.ended.set()


def text_of(asked: Asked) -> str:
    """Return a text for a prompt: prompts have as much of it in common as of their blocks."""
    return "".join(map(_block, asked.blocks))[: CHARACTERS * asked.prompt]


@functools.lru_cache(1 << 15)
def _block(number: int) -> str:
    return (hashlib.sha256(str(number).encode()).hexdigest() * BLOCK)[: CHARACTERS * BLOCK]


async def run_program(argv: list[str], *, task_status: trio.TaskStatus[None]) -> None:
    """Run a program until cancelled.

    Raises:
        RuntimeError: It has ended by itself; the message has its last lines.
    """
    with tempfile.TemporaryFile() as log:
        process = await trio.lowlevel.open_process(
            argv, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "RUST_LOG": "warn"}
        )
        task_status.started()
        try:
            await process.wait()
            log.seek(0)
            raise RuntimeError(f"{argv[0]} ended:\n{log.read()[-2000:].decode(errors='replace')}")
        finally:
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()


async def _until_healthy(port: int) -> None:
    """Wait until a router is healthy, and names no server as out."""
    with trio.fail_after(_TIMEOUT):
        healthy = False
        while not healthy:
            await trio.sleep(0.2)
            try:
                status, body = await get(port, "/health")
                healthy = status == 200 and '"up":false' not in body
            except (OSError, trio.BrokenResourceError, IndexError):
                continue


def _table(
    names: Sequence[str], found: dict[str, list[dict[str, float]]], endless: Sequence[float]
) -> str:
    heads = [""]
    for name in names:
        heads += [f"{name}: TTFT p50 · p90 · p99 in s", "cached"]
    lines = []
    for router, figures in found.items():
        line = [router]
        for each in figures:
            line.append(" · ".join(f"{each[name]:.2f}" for name in ("p50", "p90", "p99")))
            line.append(f"{each['hits']:.1%}")
        lines.append(line)
    lines.append(["one endless cache", *(x for each in endless for x in ("", f"{each:.1%}"))])
    return markdown(heads, lines)


def _verdicts(names: Sequence[str], found: dict[str, list[dict[str, float]]]) -> list[Verdict]:
    """Return how many times as slow the best other router is."""
    verdicts = []
    for number, trace in enumerate(names):
        for quantile in ("p50", "p90"):
            others = {n: f[number][quantile] for n, f in found.items() if n != OWN}
            best = min(others, key=others.__getitem__)
            ratio = others[best] / found[OWN][number][quantile]
            what = f"TTFT {quantile} of the {trace} trace by {OWN}"
            verdicts.append(Verdict(what=what, against=best, bound=FACTOR, reached=ratio))
    return verdicts


@script
async def measure(
    *,
    traces: Sequence[str] = ("conversation_trace.jsonl", "synthetic_trace.jsonl"),
    load: float = 0.8,
    workers: int = 8,
    requests: int = 1 << 30,
    own_requests: int = 1000,
) -> Made:
    """Return the figures of all routers on traces, at a share of the workers' highest rate."""
    programs = {name: make() for name, make in ROUTERS.items()}
    found: dict[str, list[dict[str, float]]] = {}
    endless, speeds, through_program = [], {}, {}
    for path in traces:
        trace = read(Path(path), 1.0, requests)
        speeds[path] = round(speed_for(trace, workers, load), 2)
        trace = read(Path(path), speeds[path], requests)
        endless.append(endless_hits(trace))
        for name in (OWN, *_OTHERS):
            figures = replay(trace, workers, POLICIES[name]())
            found.setdefault(name, []).append(figures)
        for name, program in programs.items():
            print(f"{path}: {name}", file=sys.stderr, flush=True)
            figures = await replay_through(program.argv, trace, workers)
            found.setdefault(name, []).append(figures)
        first = trace[:own_requests]
        through_program[path] = {
            OWN: replay(first, workers, POLICIES[OWN]()),
            "trioserve route": await replay_through(own_router, first, workers),
        }
    names = [Path(each).stem.removesuffix("_trace") for each in traces]
    facts: dict[str, Any] = {
        "speeds": speeds,
        "first_requests": through_program,
        "servers": {name: program.versions for name, program in programs.items()},
        "verdicts": [attrs.asdict(each) for each in _verdicts(names, found)],
    }
    return Made(_table(names, found, endless), facts)
