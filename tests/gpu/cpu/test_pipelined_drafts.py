"""Stages verify drafts while other plans are in flight, and know what finding them costs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from gpu.cpu.executor import CpuExecutor
from gpu.cpu.torch_following import FollowingTorchModel
from gpu.cpu.torch_model import TorchSampler
from gpu.loading.step_measuring import measure_steps
from gpu.runner import Runner
from gpu.sampling.drafting.drafter import DraftedStep, Drafter
from gpu.sampling.drafting.step_times import StepTimes
from gpu.sampling.drawn import Drawn
from gpu.sampling.sampler import Sampler
from gpu.slots import Row, SlotTable
from tests.gpu.lora.test_models import HAS_KERNELS, compiled
from tests.support.adjusters import ToyAdjuster, chained
from tests.support.plans import GREEDY, PlanMaker
from tests.support.thread_stages import ThreadStages
from tests.support.tiny_models import make_tiny
from trioserve.protocol.sampling import SamplerParams
from trioserve.protocol.speculation import SpeculativeConfig
from trioserve.protocol.wire import StepResult, floats, from_ints, ints

VOCAB = 300
PAGES = {"page_size": 4, "num_pages": 200}
LENGTH = 30
MOST_DRAFTS = 4
PARAMS = [
    SamplerParams(temperature=0.0, logprobs=0),
    SamplerParams(temperature=0.8, seed=1, logprobs=2, frequency_penalty=0.5),
    chained(SamplerParams(temperature=0.9, seed=2, logprobs=0)),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return make_tiny("qwen2_window", folder, num_hidden_layers=3, head_dim=32)


class Watched(Drafter):
    """A drafter that keeps what it is told."""

    def __init__(self) -> None:
        config = SpeculativeConfig(method="ngram", adaptive=False)
        super().__init__(config, StepTimes({1: 1.0, 8: 1.0}))
        self.shares: list[float] = []
        self.learned: list[tuple[DraftedStep, float]] = []

    def add_drafts(
        self, rows: Sequence[Row], room: int | None = None, share: float = 1.0
    ) -> DraftedStep:
        self.shares.append(share)
        return super().add_drafts(rows, room, share)

    def learn(self, step: DraftedStep, drawn: Drawn, seconds: float) -> None:
        self.learned.append((step, seconds))
        super().learn(step, drawn, seconds)


@pytest.fixture(params=[2, 3])
def stages(tiny: Path, request: Any) -> Iterator[ThreadStages]:
    if not HAS_KERNELS:
        pytest.skip("no compiled kernels")
    adjuster = ToyAdjuster(VOCAB)
    with ThreadStages.open(tiny, request.param, adjuster=adjuster, compiled=True, **PAGES) as found:
        found.slots.max_row_tokens = MOST_DRAFTS + 1
        found.executor.drafter = Watched()
        yield found


def prompt(slot: int) -> list[int]:
    return [5 + slot, 7, 9, 11 + slot]


@attrs.define
class Outputs:
    """Tokens and log-probabilities by slot."""

    tokens: dict[int, list[int]] = attrs.field(factory=dict)
    logprobs: dict[int, list[float]] = attrs.field(factory=dict)

    def add(self, result: StepResult) -> None:
        offsets = ints(result.offsets).tolist()
        for place, slot in enumerate(ints(result.slots).tolist()):
            own = slice(offsets[place], offsets[place + 1])
            self.tokens.setdefault(slot, []).extend(ints(result.tokens)[own].tolist())
            self.logprobs.setdefault(slot, []).extend(floats(result.logprobs)[own].tolist())


def without_drafts(tiny: Path) -> Outputs:
    slots = SlotTable(max_model_len=512, vocab_size=VOCAB, **PAGES)
    sampler = TorchSampler(Sampler(VOCAB, "cpu"))
    executor = CpuExecutor(compiled(tiny), sampler, slots, ToyAdjuster(VOCAB))
    runner = Runner(executor, slots, max_num_batched_tokens=256)
    maker, found = PlanMaker(runner.step, **PAGES), Outputs()
    for slot, params in enumerate(PARAMS):
        maker.open(slot, prompt(slot), params)
    found.add(runner.step(maker.plan({slot: len(prompt(slot)) for slot in maker.slots})))
    for _ in range(LENGTH + 2 * MOST_DRAFTS):
        found.add(runner.step(maker.plan(dict.fromkeys(maker.slots, 1))))
    return found


def predicted(tokens: Sequence[int]) -> bytes:
    """Return a prediction of ``tokens`` in which each seventh is wrong."""
    return from_ints([(token + (place % 7 == 6)) % VOCAB for place, token in enumerate(tokens)])


def test_tokens_are_those_without_drafts(tiny: Path, stages: ThreadStages) -> None:
    """Two plans are in flight, and at last one that closes the slots of the one before."""
    expected = without_drafts(tiny)
    runner = Runner(stages.executor, stages.slots, max_num_batched_tokens=256)
    maker, found = PlanMaker(runner.step, **PAGES), Outputs()
    num_drafted = num_refused = 0
    in_flight: deque[list[int]] = deque([[0, 1], [2]])
    for group in in_flight:
        for slot in group:
            prediction = predicted(expected.tokens[slot])
            maker.open(slot, prompt(slot), attrs.evolve(PARAMS[slot], prediction=prediction))
        runner.submit(maker.plan({slot: len(prompt(slot)) for slot in group}))
    while in_flight:
        group, result = in_flight.popleft(), runner.finish()
        found.add(result)
        group = [slot for slot in group if slot in maker.slots]
        if not group:
            continue
        given = maker.accept(result)
        assert all(given.values())
        if result.drafted:
            num_drafted += int(ints(result.drafted).sum())
            num_refused += int(ints(result.drafted).sum()) + len(given) - len(ints(result.tokens))
        for slot in group:  # what refused drafts have written is overwritten
            maker.slots[slot].computed = len(maker.slots[slot].tokens) - 1
        runner.submit(maker.plan(dict.fromkeys(group, MOST_DRAFTS + 1)))
        in_flight.append(group)
        if min(len(found.tokens[slot]) for slot in group) >= LENGTH:
            for slot in group:
                maker.close(slot)
            runner.submit(maker.plan({}))
            in_flight.append([])
    for slot in range(len(PARAMS)):
        count = len(found.tokens[slot])
        assert count > LENGTH
        assert found.tokens[slot] == expected.tokens[slot][:count]
        assert found.logprobs[slot] == expected.logprobs[slot][:count]
    assert 0 < num_refused < num_drafted


def test_finding_drafts_counts_as_far_as_it_delays_other_plans(
    stages: ThreadStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It delays the plans behind a step by its whole time, and is no part of the stage's."""
    drafter, look_up = stages.executor.drafter, Drafter._look_up

    def slow(*arguments: Any) -> Any:
        time.sleep(0.1)
        return look_up(*arguments)

    monkeypatch.setattr(Drafter, "_look_up", slow)
    assert isinstance(drafter, Watched)
    runner = Runner(stages.executor, stages.slots, max_num_batched_tokens=256)
    maker = PlanMaker(runner.step, **PAGES)
    for slot in (0, 1):
        maker.open(slot, prompt(slot), GREEDY)
    maker.step({slot: len(prompt(slot)) for slot in (0, 1)})
    drafter.shares.clear()
    drafter.learned.clear()
    for slot in (0, 1):
        runner.submit(maker.plan({slot: MOST_DRAFTS + 1}))
    results = [runner.finish(), runner.finish()]
    assert drafter.shares == [1 / stages.num_stages, 2 / stages.num_stages]
    for share, (step, seconds), result in zip(
        drafter.shares, drafter.learned, results, strict=True
    ):
        assert step.search_seconds is not None
        assert step.search_seconds >= 0.1 * share
        assert 0 < seconds - step.search_seconds < 0.1
        assert result.step_us >= 100_000


def test_steps_are_measured_by_their_slowest_stage(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = FollowingTorchModel.compute

    def slow(self: FollowingTorchModel, step: Any) -> Any:
        time.sleep(0.05)
        return compute(self, step)

    monkeypatch.setattr(FollowingTorchModel, "compute", slow)
    with ThreadStages.open(tiny, 3, **PAGES) as stages:
        times = measure_steps(stages.executor, stages.slots, 4, 2, reported=True)
        passed = measure_steps(stages.executor, stages.slots, 4, 1)
    assert 0.05 <= times.seconds(1) < 0.1 <= passed.seconds(1)
