"""Workers lost under load, one of four after the other: is anything lost, and how long is a pause?

``python -m tests.faults.worker_kills``. Two workers are processes of the engine, and are killed
with SIGKILL. Two join over TLS, and their network is cut: by closed connections, and by silence,
which is noticed after ``--link-timeout`` seconds. Each computes with one thread. Every answer has
to be the undisturbed one of an engine with one worker, to the last bit (:mod:`.streams`), so the
compiled kernels are needed. The four workers draft tokens; the one that is compared with doesn't.

With ``--apart`` a worker is lost only once all four serve, so that none is loaded meanwhile.

With ``--mock`` the workers compute nothing, and a step takes 20 ms and 1 ms for each token of a
prompt. Then no pause is longer because workers share cores.

A pause is the gap in an output's stream around its move to another worker. Beside it stands the
time in which a new request with as many tokens as the moved one has its prompt computed under the
same load: a straight line through the prompts of the run. Pauses are counted apart during which a
worker that was lost before is being replaced: what its process loads takes time from all on these
cores.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import itertools
import os
import random
import signal
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import trio

from bench.report import Made, markdown, run_script
from bench.servers import MODEL
from tests.faults.streams import ADAPTER, KINDS, PLAIN, Load, Stream, questions
from tests.support.cut_network import Network, open_network
from tests.support.lora_adapters import make_adapter
from tests.support.other_hosts import ENGINE_OPTIONS, address_of, agent_for, running, wait_states
from trioserve import Engine, open_engine
from trioserve.engine.engine_worker import EngineWorker
from trioserve.load.figures import spread_of
from trioserve.model_files import locate
from trioserve.protocol.machine import Machine
from trioserve.protocol.wire import MockSteps
from trioserve.workers.remote.certificates import make_certificates

LOSSES = ("killed", "closed", "killed", "silent")
"""Ways to lose a worker, in turn; ``removed`` is another one."""
TWICE = "two losses"
"""Pauses in which the next worker was lost, too."""
_HOSTS = ("first", "second")
_NUM_WORKERS = 2 + len(_HOSTS)
_OPTIONS: dict[str, Any] = {
    **ENGINE_OPTIONS,
    "dtype": "bfloat16",
    "num_gpu_blocks_override": 1024,
    "max_model_len": 512,
    "grammar_timeout": 60.0,
    "enable_lora": True,
}
MOCK = MockSteps(step_seconds=0.02, token_seconds=0.001)
_LOOK_EVERY, _REST = 0.002, 0.05
_PATIENCE = 170.0


@attrs.frozen(kw_only=True)
class Scenario:
    """The load and the losses; ``mean_interval`` lies between two of them."""

    losses: int = 100
    ways: Sequence[str] = LOSSES
    clients: int = 6
    requests: int = 48
    words: int = 60
    tokens: int = 96
    mean_interval: float = 3.0
    link_timeout: float = 5.0
    seed: int = 0
    apart: bool = False
    """True to lose a worker only once all four serve, and remove one only after one was added."""
    mock: MockSteps | None = None
    """Times of workers that compute nothing, and answer to plain requests only."""


@attrs.frozen(kw_only=True)
class Move:
    """A request that left a lost worker at ``moved``, and its tokens to compute by then."""

    stream: Stream
    way: str
    another_loads: bool
    lost: float
    moved: float
    num_tokens: int


@attrs.frozen(kw_only=True)
class Pause:
    """The gap of an output around a move, in seconds, and its request's tokens to compute in it."""

    way: str
    another_loads: bool
    noticed: float
    gap: float
    num_tokens: int


@attrs.define(eq=False, kw_only=True)
class Losses:
    """One run over an engine with four workers."""

    scenario: Scenario
    engine: Engine
    load: Load
    networks: dict[str, Network]
    moves: list[Move] = attrs.field(factory=list)
    lost: Counter[str] = attrs.field(factory=Counter)
    stayed: int = 0
    """Number of requests that waited for the next process of their own worker."""
    replaced: list[float] = attrs.field(factory=list)
    """Seconds from each loss until the next worker served."""
    _numbers: random.Random = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._numbers = random.Random(self.scenario.seed + 1)

    async def run(self) -> None:
        """Lose workers under load."""
        every = itertools.islice(itertools.cycle(self.scenario.ways), self.scenario.losses)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.load.run)
            async with trio.open_nursery() as followers:
                for number, way in enumerate(every, 1):
                    await trio.sleep(self._numbers.expovariate(1 / self.scenario.mean_interval))
                    with trio.fail_after(_PATIENCE):
                        await self._lose(way, followers)
                    wrong = "" if self.load.is_right else f", WRONG: {self.load.mistakes()}"
                    answered = len(self.load.ended)
                    print(f"{number}/{self.scenario.losses} {way}, {answered} answered{wrong}")
            self.load.end()

    async def _lose(self, way: str, followers: trio.Nursery) -> None:
        """Lose a worker that has streams; at most one other is being loaded meanwhile."""
        apart = self.scenario.apart
        if apart and way == "removed":
            await self.engine.add_worker()
        least = _NUM_WORKERS - (not apart)
        while len(self._serving()) < least or (worker := self._victim(way)) is None:
            await trio.sleep(_LOOK_EVERY)
        self.lost[way] += 1
        followers.start_soon(self._follow, way, worker, self._streams_on(worker))
        await getattr(self, f"_{way}")(worker)

    def _serving(self) -> list[EngineWorker]:
        group = self.engine.worker_group
        return [each for each in group if each.supervisor.life.state == "running"]

    def _streams_on(self, worker: EngineWorker) -> list[Stream]:
        """Return the streams that ``worker`` computes."""
        every = self.load.running
        return [each for each in every if each.generation.request.scheduler is worker.scheduler]

    def _victim(self, way: str) -> EngineWorker | None:
        """Return a worker that can be lost that way, and has a stream that has begun."""
        is_joined = way in ("closed", "silent")
        able = [
            worker
            for worker in self._serving()
            if (worker.traffic.host is not None) == is_joined
            and any(each.times for each in self._streams_on(worker))
        ]
        return self._numbers.choice(able) if able else None

    async def _follow(self, way: str, worker: EngineWorker, streams: list[Stream]) -> None:
        """Note when each of ``streams`` has left ``worker``, until it is replaced or removed."""
        lost, restarts = trio.current_time(), worker.supervisor.restarts
        while worker.supervisor.restarts == restarts or worker.state != "running":
            if worker not in list(self.engine.worker_group):
                return
            await trio.sleep(_LOOK_EVERY if streams else _REST)
            if worker.supervisor.restarts == restarts:
                # Until the loss is noticed, the worker gets requests.
                streams += [each for each in self._streams_on(worker) if each not in streams]
            staying = []
            for stream in streams:
                if stream.generation.request.scheduler is not worker.scheduler:
                    stream.moves += 1
                    move = Move(
                        stream=stream,
                        way=way,
                        another_loads=len(self._serving()) < _NUM_WORKERS - 1,
                        lost=lost,
                        moved=trio.current_time(),
                        num_tokens=stream.num_tokens,
                    )
                    self.moves.append(move)
                elif not stream.ended:
                    staying.append(stream)
            streams = staying
        self.stayed += len(streams)
        self.replaced.append(trio.current_time() - lost)

    async def _killed(self, worker: EngineWorker) -> None:
        pid = worker.supervisor.life.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await self._noticed(worker)

    async def _closed(self, worker: EngineWorker) -> None:
        network = self.networks[str(worker.traffic.host)]
        await network.close()
        await self._noticed(worker)
        network.open()

    async def _silent(self, worker: EngineWorker) -> None:
        network = self.networks[str(worker.traffic.host)]
        network.hold()
        await self._noticed(worker)
        await trio.sleep(self._numbers.uniform(0, 0.5))
        network.flow()

    async def _removed(self, worker: EngineWorker) -> None:
        await self.engine.remove_worker(worker.index)
        if not self.scenario.apart:
            await self.engine.add_worker()

    async def _noticed(self, worker: EngineWorker) -> None:
        while worker.supervisor.life.state == "running":
            await trio.sleep(_LOOK_EVERY)

    def pauses(self) -> list[Pause]:
        """Return the pauses of outputs that had begun."""
        found = []
        moved = {(move.stream, move.moved) for move in self.moves}
        for move in self.moves:
            for times in move.stream.times.values():
                place = bisect.bisect(times, move.moved)
                if not 0 < place < len(times):
                    continue
                first, last = times[place - 1 : place + 1]
                inside = [at for stream, at in moved if stream is move.stream and first < at < last]
                if move.moved > min(inside):
                    continue  # It is part of the pause that the first of two losses began.
                pause = Pause(
                    way=move.way if len(inside) == 1 else TWICE,
                    another_loads=move.another_loads,
                    noticed=move.moved - move.lost,
                    gap=last - first,
                    num_tokens=move.num_tokens,
                )
                found.append(pause)
        return found

    def ordinary_gaps(self) -> list[float]:
        """Return the gaps between chunks of requests that weren't moved."""
        return [
            later - earlier
            for stream in self.load.ended
            if not stream.moves
            for times in stream.times.values()
            for earlier, later in itertools.pairwise(times)
        ]

    def prefills(self) -> list[tuple[int, float]]:
        """Return tokens and seconds of the prompts of requests that weren't moved, in order.

        Those of beams aren't known: their first token comes with the last.
        """
        found = []
        for stream in self.load.ended:
            if "beam_width" in self.load.asked[stream.question]:
                continue
            times, usage = stream.generation.times, stream.generation.usage
            if not stream.moves and times.first_scheduled and times.first_token:
                computed = usage.prompt_tokens - usage.cached_tokens
                found.append((computed, times.first_token - times.first_scheduled))
        return sorted(found)

    def counts(self) -> dict[str, Any]:
        """Return the counts of requests and of what differs."""
        ended = self.load.ended
        return {
            **{f"workers {way}": number for way, number in self.lost.items()},
            "requests that were moved": sum(each.moves > 0 for each in ended),
            "… most often": max((each.moves for each in ended), default=0),
            "requests that waited for their own worker": self.stayed,
            **self.load.counts(),
        }


@contextlib.asynccontextmanager
async def open_four(
    model: str, tls: Path, link_timeout: float, mock: MockSteps | None
) -> AsyncIterator[tuple[Engine, dict[str, Network]]]:
    """Open an engine with two workers of its own, and two that have joined by networks."""
    options = {**_OPTIONS, "data_parallel_size": 2, "worker_tls": str(tls)}
    options["worker_link_timeout"] = link_timeout
    if mock is None:
        options["speculative_config"] = '{"method": "suffix"}'
    async with (
        open_engine(model, mock=mock, **options) as engine,
        contextlib.AsyncExitStack() as stack,
    ):
        networks = {}
        for host in _HOSTS:
            network = await stack.enter_async_context(open_network(address_of(engine)))
            agent = agent_for(network.address, tls, locate(model), host=host)
            await stack.enter_async_context(running(agent))
            networks[host] = network
        await wait_states(engine, *["running"] * _NUM_WORKERS)
        yield engine, networks


async def lose_workers(scenario: Scenario, model: str) -> Losses:
    """Run ``scenario`` on an engine of ``model``."""
    sizes = (scenario.requests, scenario.words, scenario.tokens, scenario.seed)
    asked = questions(KINDS if scenario.mock is None else PLAIN, *sizes)
    with tempfile.TemporaryDirectory() as folder:
        make_certificates(tls := Path(folder) / "tls")
        adapters = {}
        if scenario.mock is None:
            adapters[ADAPTER] = make_adapter(locate(model), Path(folder) / "adapter")
        alone = {**_OPTIONS, "data_parallel_size": 1, "worker_listen": None}
        async with open_engine(model, mock=scenario.mock, **alone) as engine:
            await _load(engine, adapters)
            load = Load(engine=engine, asked=asked, clients=scenario.clients)
            await load.learn()
        print(f"{len(asked)} requests answered undisturbed")
        opening = open_four(model, tls, scenario.link_timeout, scenario.mock)
        async with opening as (engine, networks):
            await _load(engine, adapters)
            load.engine = engine
            run = Losses(scenario=scenario, engine=engine, load=load, networks=networks)
            await run.run()
            engine.check_integrity()
    return run


async def _load(engine: Engine, adapters: Mapping[str, Path]) -> None:
    for name, path in adapters.items():
        await engine.load_adapter(name, path)


def figures(run: Losses) -> Made:
    """Return the tables of a run; the exit code is 1 if a request was lost or anything differs."""
    pauses = run.pauses()
    line = line_through(run.prefills())
    beyond: dict[tuple[str, bool], list[float]] = {}
    lines = []
    ways = dict.fromkeys([*run.scenario.ways, *(each.way for each in pauses)])
    for key in itertools.product(ways, (False, True)):
        own = [each for each in pauses if (each.way, each.another_loads) == key]
        if not own:
            continue
        way, another_loads = key
        prefills = [line.intercept + line.slope * each.num_tokens for each in own]
        # Until silence is noticed is a choice of the operator's.
        waits = [each.noticed if way == "silent" else 0.0 for each in own]
        beyond[key] = [
            each.gap - prefill - wait
            for each, prefill, wait in zip(own, prefills, waits, strict=True)
        ]
        noticed, gaps = [each.noticed for each in own], [each.gap for each in own]
        cells = map(_spread, (noticed, gaps, prefills, beyond[key]))
        lines.append([way + ", while another loads" * another_loads, len(own), *cells])
    heads = ["ms, p50 · p99 · most", "outputs", "until moved", "pause", "one prefill"]
    table = markdown([*heads, "pause beyond one prefill"], lines)
    prefills = [seconds for _, seconds in run.prefills()]
    usual = [seconds - line.intercept - line.slope * count for count, seconds in run.prefills()]
    facts = {
        "gap between tokens of requests that weren't moved": _spread(run.ordinary_gaps()),
        "their prefills": _spread(prefills),
        "… beyond the straight line": _spread(usual),
    }
    if run.replaced:
        facts["from a loss to the next worker"] = _spread(run.replaced)
    counts = run.counts()
    second = markdown(("", ""), [*counts.items(), *facts.items()])
    kept = {
        way: spread_of(beyond[way, False]).p99 <= 200
        for way in run.scenario.ways
        if (way, False) in beyond
    }
    slope = {"prefill_ms": {"first": 1000 * line.intercept, "token": 1000 * line.slope}}
    given = {"within_200_ms_at_p99": kept, "passed": run.load.is_right, **slope}
    return Made(
        f"{table}\n\n{second}",
        {"failed": dict(run.load.failed), **given},
        int(not run.load.is_right),
    )


def line_through(points: Sequence[tuple[int, float]]) -> statistics.LinearRegression:
    """Return the straight line through the medians of eighths of ``points``, which are in order."""
    size = max(len(points) // 8, 1)
    parts = [points[first : first + size] for first in range(0, len(points), size)]
    medians = ([statistics.median(column) for column in zip(*part, strict=True)] for part in parts)
    return statistics.linear_regression(*zip(*medians, strict=True))


def _spread(seconds: Sequence[float]) -> str:
    spread = spread_of(seconds)
    return f"{spread.p50:.0f} · {spread.p99:.0f} · {1000 * max(seconds, default=0):.0f}"


def demand_kernels() -> None:
    """End the program if torch would compute the model."""
    if not Machine().kernel_isas():
        raise SystemExit(
            f"only compiled kernels have one answer: {Machine().obstacle_to_kernels()}"
        )


def result_name(name: str, arguments: Sequence[str] | None) -> str:
    """Return the name of a result with these arguments, or those of this program."""
    given = list(sys.argv if arguments is None else arguments)
    name += "".join(f"_{each}" for each in ("mock", "apart") if f"--{each}" in given)
    if "--clients" in given:
        name += f"_{given[given.index('--clients') + 1]}_clients"
    return name


def figures_of(scenario: Scenario, options: argparse.Namespace) -> Made:
    """Return the figures of a scenario, over the workers that the options name."""
    if options.mock:
        scenario = attrs.evolve(scenario, mock=MOCK)
    else:
        demand_kernels()
    return figures(trio.run(lose_workers, scenario, options.model))


def measure(options: argparse.Namespace) -> Made:
    """Return the figures of workers that are lost."""
    given = vars(options)
    names = ("clients", "words", "tokens", "mean_interval", "link_timeout", "seed", "apart")
    scenario = Scenario(losses=options.kills, **{name: given[name] for name in names})
    return figures_of(scenario, options)


def main(arguments: Sequence[str] | None = None) -> int:
    """Lose workers; return 1 if a request was lost or anything differs."""
    return run_script(
        *(result_name("faults_worker_kills", arguments), measure, arguments),
        **{"model": MODEL, "kills": 100, "clients": 6, "words": 60, "tokens": 96},
        **{"mean_interval": 3.0, "link_timeout": 5.0, "seed": 0, "mock": False, "apart": False},
    )


if __name__ == "__main__":
    raise SystemExit(main())
