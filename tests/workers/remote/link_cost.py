"""The cost of a worker of another host: ``python -m tests.workers.remote.link_cost``.

An engine in this process has one worker that computes nothing: its own, or one behind an agent that
has joined over TLS; both are processes on this machine. The processor time of each process is
divided by the steps. There is one plan in flight, so the time of a step has a plan's way there and
its result's way back; more streams make the messages larger.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import trio

from bench.report import Made, Rounds, in_turns, markdown, own_versions, script
from tests.support.ports import free_port
from tests.support.tiny_models import make_tiny
from trioserve import Engine, open_engine
from trioserve.protocol.wire import MockSteps
from trioserve.workers.remote.certificates import make_certificates

HERE, ELSEWHERE = "of the engine", "behind the port"
TOKENS = 400
"""Tokens of an answer."""


@contextlib.contextmanager
def agent_for(folder: Path, address: str) -> Iterator[None]:
    """Run the agent of a worker, as a command, for the block."""
    command = [sys.executable, "-m", "trioserve", "worker", str(folder / "model")]
    command += ["--join", address, "--tls", str(folder / "tls")]
    with subprocess.Popen(command) as agent:
        try:
            yield
        finally:
            agent.kill()


@contextlib.asynccontextmanager
async def engine_with(worker: str, folder: Path, streams: int) -> AsyncIterator[Engine]:
    """Open an engine over that worker."""
    options: dict[str, Any] = {"device": "cpu", "num_threads": 1, "max_num_seqs": streams}
    options |= {
        "max_plans_in_flight": 1,
        "kv_cache_memory_bytes": 1 << 28,
        "max_model_len": TOKENS + 99,
    }
    with contextlib.ExitStack() as stack:
        if worker == ELSEWHERE:
            address = f"127.0.0.1:{free_port()}"
            stack.enter_context(agent_for(folder, address))
            options |= {"worker_listen": address, "worker_tls": str(folder / "tls")}
            options["data_parallel_size"] = 0
        async with open_engine(
            str(folder / "model"), mock=MockSteps(step_seconds=0.0), **options
        ) as engine:
            yield engine


def cpu() -> dict[str, float]:
    """Return the processor seconds of this process, the agent and the worker process."""
    used = {"engine": time.process_time(), "agent": 0.0}
    for each in psutil.Process().children(recursive=True):
        name = "worker" if "gpu" in each.cmdline() else "agent"
        used[name] = sum(each.cpu_times()[:2])
    return used


async def generate(engine: Engine, streams: int, answers: int) -> None:
    """Have each stream get so many answers, one after the other."""

    async def ask(number: int) -> None:
        for _ in range(answers):
            await engine.complete([number % 200 + 1] * 8, max_tokens=TOKENS, ignore_eos=True)

    async with trio.open_nursery() as nursery:
        for number in range(streams):
            nursery.start_soon(ask, number)


async def costs(worker: str, folder: Path, streams: int, answers: int) -> dict[str, float]:
    """Return µs a step: of processor time by process, and of the clock."""
    async with engine_with(worker, folder, streams) as engine:
        await generate(engine, streams, 1)
        first, began, used = engine.workers[0], time.perf_counter(), cpu()
        await generate(engine, streams, answers)
        last, seconds, total = engine.workers[0], time.perf_counter() - began, cpu()
    count = last.num_steps - first.num_steps
    found = {name: 1e6 * (total[name] - used[name]) / count for name in total}
    plan = (last.plan_bytes - first.plan_bytes) / count
    return {**found, "step": 1e6 * seconds / count, "plan": plan}


@script
def measure(*, streams: Sequence[int] = (1, 32, 256), answers: int = 2, rounds: int = 3) -> Made:
    """Return a row for each worker and number of streams, the medians of some rounds."""
    found = Rounds()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny("qwen3", folder / "model")
        make_certificates(folder / "tls")
        cases = [(width, worker) for width in streams for worker in (HERE, ELSEWHERE)]
        for _, (width, worker) in in_turns(rounds, cases):
            found.add((width, worker), **trio.run(costs, worker, folder, width, answers))
    figures = ("engine", "agent", "worker", "step", "plan")
    lines = [
        [width, worker, *(f"{of[each]:,.0f}" for each in figures)]
        for (width, worker), of in found.medians().items()
    ]
    heads = ["streams", "worker", *(f"{each}: CPU µs" for each in figures[:3])]
    facts = {"versions": {"trioserve": own_versions("pynng")}}
    return Made(markdown([*heads, "a step, µs", "a plan, bytes"], lines), facts)
