"""Prompts beside streams over time: a core, a worker with true costs, and an oracle.

The oracle is the same scheduler with a model that knows the true costs from the start.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path

import attrs
import pytest

from tests.support.scheduling import Bench
from tests.support.step_times import recorded_steps
from trioserve.requests.request import Sequence
from trioserve.scheduler.decode_hold import BRIEF, LONGEST
from trioserve.scheduler.step_time import TOKENS, StepLoad, StepTimeModel
from trioserve.testing import FakeWorker

MACHINES = {
    "zen4": (6e-3, 5e-4, 3.8e-4, 1.5e-7),
    "amx": (10e-3, 3e-4, 1.6e-4, 1.0e-7),
    "no vectors": (25e-3, 5e-3, 6e-3, 4e-7),
    "gpu": (4e-3, 2e-5, 2.5e-5, 2e-9),
}
"""Seconds of a step, a decode, a token of a prompt and a token of context."""
RECORDED = [
    Path(__file__).parent / "step_times" / f"{name}.jsonl"
    for name in ("xeon_avx512_busy", "zen4_avx2")
]
"""Files with steps of real machines.

Torch's steps aren't among them. There a prompt's context costs three times as much as its tokens,
and gaps get up to a quarter longer than these tests allow.
"""
Costs = tuple[float, float, float, float]


def costs_of(path: Path) -> Costs:
    """Return the costs that fit recorded steps."""
    model = StepTimeModel()
    for load, seconds in recorded_steps(path):
        model.observe(load, seconds)
    fixed, decode, token, read = model.coefficients
    return fixed, decode, token, read


class Oracle(StepTimeModel):
    """A model that knows the costs and learns nothing."""

    def __init__(self, costs: Costs) -> None:
        super().__init__()
        self.coefficients = list(costs)

    @property
    def is_known(self) -> bool:
        return True

    def observe(self, load: StepLoad, seconds: float) -> None:
        pass


@attrs.define(eq=False)
class Life:
    """A scheduler and its worker in time."""

    costs: Costs
    bench: Bench
    noise: random.Random = attrs.field(factory=lambda: random.Random(1))
    sequences: list[Sequence] = attrs.field(factory=list)
    tokens: dict[int, list[float]] = attrs.field(factory=dict)
    """Times of each sequence's tokens, by its place in ``sequences``."""
    steps: list[tuple[float, StepLoad]] = attrs.field(factory=list)
    """Each step's end and load."""

    @classmethod
    def of(cls, costs: Costs, *, oracle: bool = False, **limits: object) -> Life:
        worker = FakeWorker(
            num_pages=640,
            page_size=64,
            max_model_len=16384,
            max_num_seqs=64,
            max_num_batched_tokens=1024,
        )
        bench = Bench.make(worker, **limits)
        # A life has thousands of steps and hundreds of pages.
        bench.check_interval = 20
        if oracle:
            bench.core.step_times = Oracle(costs)
        return cls(costs, bench)

    def seconds(self, load: StepLoad) -> float:
        fixed, decode, token, context = self.costs
        return fixed + load.decodes * decode + load.prompt_tokens * token + load.context * context

    def submit(self, length: int, output: int, *, number: int = 0) -> int:
        """Submit a prompt of its own; return its place."""
        place = len(self.sequences)
        prompt = [(place * 7 + i * (place + 1)) % 250 for i in range(length)]
        prompt[0:3] = [place % 250, place // 250, number]
        request = self.bench.submit(prompt, max_tokens=output, arrived=self.bench.now)
        self.sequences.append(request)
        self.tokens[place] = []
        return place

    def step(self) -> bool:
        """Run one step; return False if there is nothing to do."""
        if self.bench.plan() is None:
            return False
        load = self.bench.core.in_flight[-1].load
        seconds = self.seconds(load) * self.noise.lognormvariate(0, 0.03)
        self.bench.now += seconds
        result = self.bench.results[-1]
        self.bench.results[-1] = attrs.evolve(result, step_us=round(seconds * 1e6))
        self.steps.append((self.bench.now, load))
        before = [len(each.output_ids) for each in self.sequences]
        self.bench.result()
        for place, each in enumerate(self.sequences):
            if len(each.output_ids) > before[place]:
                self.tokens[place].append(self.bench.now)
        return True

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        while not until() and self.step():
            pass

    def ttft(self, place: int) -> float:
        arrived = self.sequences[place].request.times.arrived
        return self.tokens[place][0] - arrived

    def gaps(self, places: Iterable[int], begin: float, end: float) -> list[float]:
        """Return the gaps that end within a time, sorted."""
        return sorted(
            later - earlier
            for place in places
            for earlier, later in zip(self.tokens[place], self.tokens[place][1:], strict=False)
            if begin < later <= end
        )

    def decoding(self, streams: int, output: int = 4000, length: int = 100) -> list[int]:
        """Return streams that decode, after steps that teach the model."""
        places = [self.submit(length, output) for _ in range(streams)]
        self.run(lambda: all(len(self.tokens[place]) >= 8 for place in places))
        return places


@pytest.fixture(
    params=[*MACHINES.values(), *RECORDED], ids=[*MACHINES, *(p.stem for p in RECORDED)]
)
def costs(request: pytest.FixtureRequest) -> Costs:
    return costs_of(request.param) if isinstance(request.param, Path) else request.param


@pytest.mark.parametrize("streams", [1, 16])
def test_a_prompt_doubles_the_gaps_and_its_own_time_at_most(costs: Costs, streams: int) -> None:
    life = Life.of(costs)
    places = life.decoding(streams)
    calm = life.gaps(places, life.bench.now * 0.9, life.bench.now)[-1]
    prompt = life.submit(1000, 1)
    arrived = life.bench.now
    life.run(lambda: bool(life.tokens[prompt]))
    gaps = life.gaps(places, arrived, life.bench.now)
    alone = life.seconds(StepLoad(prompt_tokens=1000, context=1000 * 500))
    assert gaps[-1] < 2.4 * max(calm, gaps[0])
    # The first gap may have begun before the prompt.
    assert life.ttft(prompt) < 2.4 * alone + 2 * calm


@pytest.mark.parametrize("target", [3.0, 8.0])
def test_gaps_keep_to_a_target(costs: Costs, target: float) -> None:
    """A target is given as a multiple of the step without prompts."""
    life = Life.of(costs)
    places = life.decoding(8)
    calm = life.gaps(places, life.bench.now * 0.9, life.bench.now)[-1]
    life.bench.core.limits = attrs.evolve(life.bench.core.limits, itl_target=target * calm)
    arrived = life.bench.now
    prompts = [life.submit(1500, 1) for _ in range(4)]
    life.run(lambda: all(life.tokens[prompt] for prompt in prompts))
    gaps = life.gaps(places, arrived, life.bench.now)
    assert 0.7 * target * calm < gaps[len(gaps) // 2]
    assert gaps[-1] < 1.3 * target * calm


def test_a_target_that_leaves_nothing_starves_no_prompt(costs: Costs) -> None:
    life = Life.of(costs, itl_target=1e-6)
    life.decoding(8)
    prompt = life.submit(1500, 1)
    life.run(lambda: bool(life.tokens[prompt]))
    alone = life.seconds(StepLoad(prompt_tokens=1500, context=1500 * 750))
    assert 5 * alone < life.ttft(prompt) < 20 * alone


def burst_beside(life: Life, streams: list[int], prompts: int, length: int) -> list[float]:
    """Submit prompts at once, run until each has its first token, and return the streams' gaps."""
    arrived = life.bench.now
    burst = [life.submit(length, 4) for _ in range(prompts)]
    life.run(lambda: all(life.tokens[prompt] for prompt in burst))
    return life.gaps(streams, arrived, life.bench.now)


def test_a_long_burst_stretches_gaps_by_a_power_of_its_size(costs: Costs) -> None:
    """The last of sixteen prompts waits a sixth longer than if nothing decoded."""
    life = Life.of(costs)
    streams = life.decoding(16)
    calm = life.gaps(streams, life.bench.now * 0.9, life.bench.now)[-1]
    began, seconds = life.bench.now, life.seconds(StepLoad(prompt_tokens=1000, context=1000 * 500))
    length = round(1000 * max(1, LONGEST / 12 / seconds))  # too long for a hold
    gaps = burst_beside(life, streams, 16, length)
    alone = life.seconds(StepLoad(prompt_tokens=16 * length, context=16 * length * length / 2))
    assert life.bench.now - began < 1.4 * alone
    assert gaps[-1] < 1.3 * 7.35 * 1.5 * calm


def test_a_short_burst_holds_decodes_once(costs: Costs) -> None:
    life = Life.of(costs)
    streams = life.decoding(16)
    before = len(life.steps)
    life.run(lambda: len(life.steps) > before + 200)
    calm = life.gaps(streams, life.steps[-50][0], life.bench.now)[-1]
    length = min(round(0.5 * BRIEF / 16 / life.costs[TOKENS]), 600)
    began = life.bench.now
    burst_beside(life, streams, 16, length)
    alone = life.seconds(StepLoad(prompt_tokens=16 * length, context=16 * length * length / 2))
    assert life.bench.now - began < 1.2 * alone + calm
    life.run(lambda: life.bench.now > began + 1.2 * alone + 20 * calm)
    gaps = life.gaps(streams, began, life.bench.now)
    assert len([gap for gap in gaps if gap > 2 * calm]) == len(streams)
    assert gaps[-1] < 1.2 * alone + 2 * calm  # and a step of decodes before, and one behind
    # The next one comes too soon.
    gaps = burst_beside(life, streams, 16, length)
    assert gaps[-1] < 1.3 * 7.35 * 1.5 * calm


def test_a_burst_holds_streams_of_its_own_longer_than_others(costs: Costs) -> None:
    """With streams that ran before it, a burst of a few seconds is computed beside them."""
    length = min(round(2 * BRIEF / 16 / costs[TOKENS]), 1200)
    alone = Life.of(costs)
    first = [alone.submit(length, 4) for _ in range(16)]  # which shows what steps cost
    alone.run(lambda: all(len(alone.tokens[prompt]) == 4 for prompt in first))
    second = [alone.submit(length, 4) for _ in range(16)]
    alone.run(lambda: all(alone.tokens[prompt] for prompt in second))
    assert all(len(alone.tokens[prompt]) == 1 for prompt in second)
    beside = Life.of(costs)
    streams = beside.decoding(4)
    calm = beside.gaps(streams, beside.bench.now * 0.9, beside.bench.now)[-1]
    gaps = burst_beside(beside, streams, 16, length)
    assert max(gaps, default=0.0) < max(BRIEF, 1.3 * 7.35 * 1.5 * calm)


def test_bursts_without_end_leave_every_stream_its_share(costs: Costs) -> None:
    """Holds take at most half of the time, and at most one gap in a hundred."""
    life = Life.of(costs)
    streams = life.decoding(4)
    length = max(round(0.1 / life.costs[TOKENS]), 16)
    began, step = life.bench.now, life.seconds(StepLoad(decodes=4, context=4 * 200))
    waiting: list[int] = []
    while life.bench.now < began + 1500 * step:
        waiting = [place for place in waiting if not life.tokens[place]]
        waiting += [life.submit(length, 1) for _ in range(8 - len(waiting))]
        life.step()
    gaps = life.gaps(streams, began, life.bench.now)
    assert len([gap for gap in gaps if gap > 20 * step]) <= 0.01 * len(gaps) + len(streams)
    held = sum(gap for gap in gaps if gap > 20 * step)
    assert held <= 0.5 * sum(gaps) + len(streams) * LONGEST


def test_a_short_prompt_doesnt_wait_for_a_long_one(costs: Costs) -> None:
    life = Life.of(costs)
    life.decoding(4)
    long = life.submit(8000, 1)
    began = life.bench.now
    life.run(lambda: life.bench.now > began + 20 * life.seconds(StepLoad(decodes=4)))
    short = life.submit(60, 1)
    life.run(lambda: bool(life.tokens[long]))
    alone = life.seconds(StepLoad(prompt_tokens=60, context=60 * 30))
    assert life.ttft(short) < 6 * alone + 3 * life.seconds(StepLoad(decodes=4))
    assert life.tokens[short][0] < life.tokens[long][0]


def test_a_long_prompt_isnt_starved_by_short_ones(costs: Costs) -> None:
    """Short prompts take half of the machine all the time, and a step's fixed costs besides."""
    life = Life.of(costs)
    life.decoding(1, output=3)
    long = life.submit(4000, 1)
    own = life.seconds(StepLoad(prompt_tokens=200, context=200 * 100))
    due = life.bench.now
    shorts: list[int] = []
    while not life.tokens[long]:
        while due <= life.bench.now:
            shorts.append(life.submit(200, 1))
            due += own / 0.5
        assert life.step()
    alone = life.seconds(StepLoad(prompt_tokens=4000, context=4000 * 2000))
    assert life.ttft(long) < 6 * alone
    life.run()
    waits = sorted(map(life.ttft, shorts))
    assert waits[len(waits) // 2] < 12 * life.seconds(StepLoad(prompt_tokens=200))


@pytest.mark.parametrize("ratio", [1 / 3, 3.0])
def test_a_machine_that_changes_its_speed_is_followed(costs: Costs, ratio: float) -> None:
    life = Life.of(costs)
    places = life.decoding(8)
    prompts = [life.submit(1500, 1) for _ in range(3)]
    life.run(lambda: all(life.tokens[prompt] for prompt in prompts))
    life.costs = tuple(each * ratio for each in life.costs)  # type: ignore[assignment]
    changed = len(life.steps)
    life.run(lambda: len(life.steps) > changed + 20)
    arrived = life.bench.now
    calm = life.seconds(StepLoad(decodes=8, context=8 * 150))
    prompt = life.submit(1000, 1)
    life.run(lambda: bool(life.tokens[prompt]))
    gaps = life.gaps(places, arrived, life.bench.now)
    assert gaps[len(gaps) // 2] < 3 * calm
    alone = life.seconds(StepLoad(prompt_tokens=1000, context=1000 * 500))
    assert life.ttft(prompt) < 4 * alone + 2 * calm


def arrivals(life: Life, seed: int) -> tuple[list[int], list[int]]:
    """Run a random load to its end; return its prompts and the streams among them."""
    rng = random.Random(seed)
    mean = life.seconds(StepLoad(prompt_tokens=300, context=300 * 150))
    due, places = 0.0, list[int]()
    while len(places) < 60:
        while due <= life.bench.now and len(places) < 60:
            length = rng.choice((20, 100, 300, 1000, 2500))
            places.append(life.submit(length, rng.choice((1, 10, 60))))
            due += rng.expovariate(1 / (3 * mean))
        if not life.step():
            life.bench.now = max(due, life.bench.now)
    life.run()
    return places, [place for place in places if len(life.tokens[place]) > 1]


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(each, marks=pytest.mark.thorough) for each in (1, 2))]
)
def test_what_is_learned_does_nearly_as_well_as_what_is_true(costs: Costs, seed: int) -> None:
    """Compare sums of times to the first token, and of the largest gaps, with the oracle's."""
    found = []
    for oracle in (False, True):
        life = Life.of(costs, oracle=oracle)
        places, streams = arrivals(life, seed)
        first = sum(map(life.ttft, places))
        gaps = life.gaps(streams, 0.0, life.bench.now)
        found.append((first, gaps[int(0.99 * len(gaps))]))
    (first, gap), (best_first, best_gap) = found
    assert first < 1.3 * best_first
    assert gap < 1.5 * best_gap
