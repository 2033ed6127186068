"""Ranks lost under load: is anything lost, and how soon is it noticed?

``python -m tests.faults.rank_faults``. The engine's only worker is several processes, its ranks.
Each of them in turn is killed (SIGKILL), stopped (SIGSTOP) or cut off, which shuts down the socket
between it and rank 0, or those to all others of rank 0. That is done while a step is under way.
Every answer has to be that of one undisturbed process (:mod:`.streams`), to the last bit.

A fault is noticed when the engine has counted the worker as lost, and its processes have ended.

A request whose grammar is being prepared is given up when that loses its third worker, whatever the
reason. So there is no fault while one that has lost two of them waits.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import signal
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import psutil
import trio

from bench.report import Made, markdown, run_script
from tests.faults.streams import ADAPTER, KINDS, Load, questions
from tests.faults.worker_kills import demand_kernels
from tests.support.lora_adapters import make_adapter
from tests.support.process_faults import cut_off
from tests.support.tiny_models import make_tiny
from trioserve import Engine, open_engine
from trioserve.text.worker_validation import MAX_WORKERS_LOST

LAYOUTS: dict[str, dict[str, Any]] = {
    "2 ranks": {"tensor_parallel_size": 2},
    "2 stages": {"pipeline_parallel_size": 2},
    "2 stages of 2 ranks": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
}
"""Options of workers of several processes."""
_OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "tensor_parallel_slices": 4,
    "device": "cpu",
    "num_threads": 1,
    "num_gpu_blocks_override": 1024,
    "max_model_len": 512,
    "grammar_timeout": 60.0,
    "enable_lora": True,
}
_SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 4}
_LOOK_EVERY = 0.002
_STEPS_BETWEEN = 3
"""Steps of a new worker before the next fault."""
_PATIENCE = 170.0


def _cut(pids: Sequence[int], rank: int) -> None:
    for pid in [pids[rank]] if rank else pids[1:]:
        cut_off(pid)


FAULTS: dict[str, Callable[[Sequence[int], int], None]] = {
    "killed": lambda pids, rank: os.kill(pids[rank], signal.SIGKILL),
    "stopped": lambda pids, rank: os.kill(pids[rank], signal.SIGSTOP),
    "cut off": _cut,
}
"""Faults of a rank, given the process ids of all."""


@attrs.frozen(kw_only=True)
class RankScenario:
    """The load and the faults of a worker; ``mean_interval`` lies between two of them."""

    layout: str
    faults: int
    clients: int = 5
    requests: int = 20
    words: int = 40
    tokens: int = 64
    mean_interval: float = 0.5
    seed: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """Options of the engine."""
        return {**_OPTIONS, **LAYOUTS[self.layout]}

    @property
    def num_ranks(self) -> int:
        """Number of processes of the worker."""
        size: int = self.options.get("tensor_parallel_size", 1)
        return size * int(self.options.get("pipeline_parallel_size", 1))


@attrs.define(eq=False, kw_only=True)
class RankFaults:
    """One run over an engine with one worker."""

    scenario: RankScenario
    engine: Engine
    load: Load
    noticed: dict[str, list[float]] = attrs.field(factory=dict)
    """Seconds from each fault until it was noticed, by the way of the loss."""
    _steps: int = 0
    """Number of steps before the last fault."""
    _unprepared: Counter[str] = attrs.field(factory=Counter)
    """Number of workers that were lost while a request's grammar was prepared, by its salt."""

    async def run(self) -> None:
        """Lose ranks under load."""
        numbers = random.Random(self.scenario.seed)
        every = itertools.cycle(itertools.product(FAULTS, range(self.scenario.num_ranks)))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.load.run)
            for number, (way, rank) in zip(range(self.scenario.faults), every, strict=False):
                await trio.sleep(numbers.expovariate(1 / self.scenario.mean_interval))
                with trio.fail_after(_PATIENCE):
                    seconds = await self._lose(way, rank)
                self.noticed.setdefault(way, []).append(seconds)
                wrong = "" if self.is_right else f", WRONG: {self.load.mistakes()}"
                print(
                    f"{self.scenario.layout}, {number}: rank {rank} {way}, {seconds:.3f} s{wrong}"
                )
            self.load.end()
        self.engine.check_integrity()

    @property
    def is_right(self) -> bool:
        """True if no request was lost, and nothing differs that mustn't."""
        if self.engine.ready.computing.startswith("compiled kernels"):
            return self.load.is_right
        differing = self.load.tokens_differing + self.load.ends_differing
        return not self.load.failed and not differing

    async def _lose(self, way: str, rank: int) -> float:
        """Lose a rank in the midst of a step; return the seconds until it was noticed."""
        (worker,) = self.engine.worker_group
        scheduler, due = worker.scheduler, self._steps + _STEPS_BETWEEN
        assert scheduler.core is not None
        while (
            (life := worker.supervisor.life).pid is None
            or scheduler.num_steps < due
            or not scheduler.core.in_flight
            or any(self._unprepared[each] == MAX_WORKERS_LOST for each in self._preparing())
        ):
            await trio.sleep(_LOOK_EVERY)
        self._unprepared = Counter({e: self._unprepared[e] + 1 for e in self._preparing()})
        self._steps = scheduler.num_steps
        pids = [life.pid, *life.rank_pids]
        processes = list(map(psutil.Process, pids))
        began, restarts = trio.current_time(), worker.supervisor.restarts
        FAULTS[way](pids, rank)
        while worker.supervisor.restarts == restarts or any(map(_is_alive, processes)):
            await trio.sleep(_LOOK_EVERY)
        return trio.current_time() - began

    def _preparing(self) -> list[str]:
        """Return the salts of requests whose grammar is being prepared."""
        asked, entering = self.load.asked, self.load.entering
        return [salt for salt, question in entering.items() if "grammar" in asked[question]]


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


async def lose_ranks(scenario: RankScenario, folder: Path) -> RankFaults:
    """Run ``scenario`` on an engine of a random model, which is written to ``folder``."""
    model = make_tiny("qwen3", folder / "model", **_SIZES)
    adapter = make_adapter(model, folder / "adapter")
    sizes = (scenario.requests, scenario.words, scenario.tokens, scenario.seed)
    options = scenario.options
    alone = {**options, "tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    async with open_engine(str(model), **alone) as engine:
        await engine.load_adapter(ADAPTER, adapter)
        load = Load(engine=engine, asked=questions(KINDS, *sizes), clients=scenario.clients)
        await load.learn()
    async with open_engine(str(model), **options) as engine:
        await engine.load_adapter(ADAPTER, adapter)
        load.engine = engine
        run = RankFaults(scenario=scenario, engine=engine, load=load)
        await run.run()
    return run


def figures(runs: Mapping[str, RankFaults]) -> Made:
    """Return the tables of runs by layout; the exit code is 1 if a request was lost or differs."""
    lines = [
        [layout, way, len(seconds), f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}"]
        for layout, run in runs.items()
        for way, seconds in run.noticed.items()
    ]
    heads = ["worker", "a rank was", "times", "noticed after, p50, s", "at most, s"]
    counts = [run.load.counts() for run in runs.values()]
    second = markdown(["", *runs], [[name, *(each[name] for each in counts)] for name in counts[0]])
    is_right = all(run.is_right for run in runs.values())
    slowest = max(max(seconds) for run in runs.values() for seconds in run.noticed.values())
    return Made(
        f"{markdown(heads, lines)}\n\n{second}",
        {"passed": is_right, "within_1_s": slowest <= 1.0},
        int(not is_right),
    )


def measure(options: argparse.Namespace) -> Made:
    """Return the figures of ranks that are lost."""
    demand_kernels()
    runs = {}
    for number, layout in enumerate(options.layouts):
        share, rest = divmod(options.faults, len(options.layouts))
        scenario = RankScenario(layout=layout, faults=share + (number < rest), seed=options.seed)
        with tempfile.TemporaryDirectory() as folder:
            runs[layout] = trio.run(lose_ranks, scenario, Path(folder))
    return figures(runs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Lose ranks; return 1 if a request was lost or anything differs."""
    options = {"layouts": list(LAYOUTS), "faults": 100, "seed": 0}
    return run_script("faults_rank_faults", measure, arguments, **options)


if __name__ == "__main__":
    raise SystemExit(main())
