"""Stages with several plans in flight give, bit for bit, what one model gives plan after plan."""

from __future__ import annotations

import random
import select
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from gpu.cpu.executor import CpuExecutor
from gpu.cpu.model import CpuModel
from gpu.cpu.stage_steps import StageSteps
from gpu.cpu.torch_model import TorchModel, TorchSampler
from gpu.lora.reading import read_adapter
from gpu.lora.torch_adapters import TorchAdapters
from gpu.runner import Runner
from gpu.sampling import prompt_logprobs
from gpu.sampling.adjustments import Adjustment, Logits
from gpu.sampling.sampler import Sampler
from gpu.slots import PlanError, Slot, SlotTable
from tests.gpu.lora.test_models import HAS_KERNELS, compiled
from tests.support.adjusters import ToyAdjuster, chained
from tests.support.lora_adapters import make_adapter
from tests.support.plans import PlanMaker, load_tiny, make_attention
from tests.support.thread_stages import ThreadStages
from tests.support.tiny_models import make_tiny
from trioserve.model_files import open_model
from trioserve.protocol.sampling import SamplerParams
from trioserve.protocol.wire import Plan, StepResult

VOCAB = 300
PAGES = {"page_size": 4, "num_pages": 200, "num_host_pages": 4}
PARAMS = [
    SamplerParams(temperature=0.0),
    SamplerParams(temperature=0.8, seed=1, logprobs=3, frequency_penalty=0.5),
    chained(SamplerParams(temperature=0.9, seed=2)),
    SamplerParams(temperature=0.0, prompt_logprobs=2, logprobs=0, logprob_token_ids=[7, 8]),
    SamplerParams(temperature=0.0, pooling="mean"),
    SamplerParams(temperature=0.0, pooling="last"),
    SamplerParams(temperature=0.0, generation_logits=True),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of sizes that the compiled kernels compute."""
    folder = tmp_path_factory.mktemp("tiny")
    return make_tiny("qwen2_window", folder, num_hidden_layers=4, head_dim=32)


@pytest.fixture(scope="module")
def adapter(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tiny, tmp_path_factory.mktemp("adapter") / "a", rank=4)


@pytest.fixture(params=["torch", "compiled"])
def is_compiled(request: Any) -> bool:
    if request.param == "compiled" and not HAS_KERNELS:
        pytest.skip("no compiled kernels")
    return bool(request.param == "compiled")


@pytest.fixture(params=[2, 3, 4])
def stages(tiny: Path, adapter: Path, is_compiled: bool, request: Any) -> Iterator[ThreadStages]:
    adjuster = ToyAdjuster(VOCAB)
    with ThreadStages.open(
        tiny, request.param, adjuster=adjuster, compiled=is_compiled, **PAGES
    ) as found:
        assert found.model.adapters is not None
        found.model.adapters.put(1, read_adapter(adapter, open_model(tiny).native, 8))
        yield found


def reference(tiny: Path, adapter: Path, is_compiled: bool) -> Runner:
    """Return a runner of the whole model, which finishes each plan before the next."""
    config = open_model(tiny).native
    slots = SlotTable(max_model_len=512, vocab_size=VOCAB, **PAGES)
    pages = PAGES["num_pages"] + PAGES["num_host_pages"]
    model: CpuModel
    if is_compiled:
        model = compiled(tiny)
    else:
        decoder = load_tiny(tiny)
        attention = make_attention(decoder, page_size=PAGES["page_size"], num_pages=pages)
        model = TorchModel(decoder, attention, TorchAdapters(config, 8, decoder.dtype))
    assert model.adapters is not None
    model.adapters.put(1, read_adapter(adapter, config, 8))
    slots.adapters = model.adapters
    sampler = TorchSampler(Sampler(VOCAB, "cpu"))
    executor = CpuExecutor(model, sampler, slots, ToyAdjuster(VOCAB))
    return Runner(executor, slots, max_num_batched_tokens=256)


@attrs.define
class Life:
    """A sequence: tokens of its prompt that are left, and the plan that draws its last token."""

    slot: int
    left: int
    drawn_in: int = -1


class Schedule:
    """Plans at random, in which no row comes before the token that it needs is known."""

    def __init__(self, seed: int, depth: int, pages: Mapping[str, int] = PAGES) -> None:
        self._rng = random.Random(seed)
        self._depth = depth
        self._pages = pages
        self._maker = PlanMaker(_never, page_size=pages["page_size"], num_pages=pages["num_pages"])
        self._lives: list[Life] = []
        self._next_slot = 0

    def plan(self, number: int) -> Plan:
        """Return plan ``number``; the result of plan ``number - depth`` is known."""
        rng = self._rng
        while len(self._lives) < 6:
            self._open()
        for life in [each for each in self._lives if not each.left and rng.random() < 0.1]:
            self._lives.remove(life)
            self._maker.close(life.slot)
        rows: dict[int, int] = {}
        for life in rng.sample(self._lives, len(self._lives)):
            if rng.random() < 0.4:
                continue
            if life.left:
                rows[life.slot] = count = rng.randint(1, life.left)
                life.left -= count
                life.drawn_in = -1 if life.left else number
            elif life.drawn_in <= number - self._depth:
                rows[life.slot], life.drawn_in = 1, number
        if rng.random() < 0.2:
            host = self._maker.num_pages + rng.randrange(self._pages["num_host_pages"])
            page = self._maker.free[0]  # that no sequence has
            self._maker.copies += [(rng.randrange(self._maker.num_pages), host), (host, page)]
        return self._maker.plan(dict(sorted(rows.items(), key=lambda row: row[1] > 1)))

    def _open(self) -> None:
        rng = self._rng
        length = rng.randint(1, 30)
        params = rng.choice(PARAMS)
        scored = params.prompt_logprobs >= 0 and length > 1
        self._maker.open(
            self._next_slot,
            [rng.randrange(VOCAB) for _ in range(length)],
            params,
            prompt_logprobs_from=rng.randint(1, length - 1) if scored else -1,
            states_from=rng.randrange(length) if params.generation_logits else -1,
            context_logits_from=rng.randrange(length) if params.generation_logits else -1,
            adapter=rng.choice((0, 0, 1)),
        )
        self._lives.append(Life(self._next_slot, length))
        self._next_slot += 1


def _never(_: Plan) -> StepResult:
    raise AssertionError("these plans are run elsewhere")


def untimed(result: StepResult) -> StepResult:
    return attrs.evolve(result, step_us=0, idle_us=0)


def run_in_flight(runner: Runner, plans: list[Plan], depth: int) -> Iterator[StepResult]:
    """Yield the results of ``plans``, of which up to ``depth`` are in flight."""
    for plan in plans:
        if runner.num_pending == depth:
            yield runner.finish()
        runner.submit(plan)
    while runner.num_pending:
        yield runner.finish()


@pytest.mark.parametrize("seed", range(6))
def test_results_are_those_of_one_model(
    tiny: Path,
    adapter: Path,
    is_compiled: bool,
    stages: ThreadStages,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slots are closed while plans with them are in flight, also those with masks and means.

    Logits of prompts come in slices of three rows, or in one.
    """
    if seed % 2:
        monkeypatch.setattr(prompt_logprobs, "SLICE_BYTES", 3 * 4 * VOCAB)
    depth = stages.num_stages + 1
    schedule = Schedule(seed, depth)
    plans = [schedule.plan(number) for number in range(60)]
    whole = reference(tiny, adapter, is_compiled)
    expected = [untimed(whole.step(plan)) for plan in plans]
    runner = Runner(stages.executor, stages.slots, max_num_batched_tokens=256)
    found = [untimed(each) for each in run_in_flight(runner, plans, depth)]
    assert found == expected
    assert any(each.prompts for each in found)
    assert any(each.pooled for each in found)
    assert any(each.ids_logprobs for each in found)
    names = {piece.name for each in found for piece in each.tensors}
    assert names == {"hidden_states", "context_logits", "generation_logits"}


class Failing(ToyAdjuster):
    """Fails for each row of the slots that it adjusts."""

    def adjustment(self, logits: Logits, slots: Sequence[Slot]) -> Adjustment:
        raise PlanError("a processor failed", slots[0].number)


def test_plans_that_fail_are_forgotten(tiny: Path) -> None:
    """Both plans in flight have rows that can't be drawn. The worker goes on after a reset."""
    with ThreadStages.open(tiny, 2, adjuster=Failing(VOCAB), **PAGES) as stages:
        runner = Runner(stages.executor, stages.slots, max_num_batched_tokens=256)
        maker = PlanMaker(_never)
        for slot in (1, 2):
            maker.open(slot, [slot, 2, 3], PARAMS[2])
            runner.submit(maker.plan({slot: 3}))
        with pytest.raises(PlanError, match="a processor failed"):
            runner.finish()
        runner.reset(1)
        maker = PlanMaker(_never)
        maker.open(1, [1, 2, 3])
        runner.submit(maker.plan({1: 3}))
        assert len(runner.finish().tokens) == 4


def test_a_row_before_its_token_is_refused(stages: ThreadStages) -> None:
    runner = Runner(stages.executor, stages.slots, max_num_batched_tokens=256)
    maker = PlanMaker(_never)
    maker.open(3, [1, 2, 3])
    runner.submit(maker.plan({3: 3}))
    with pytest.raises(PlanError, match="slot 3 has a row before its token is known"):
        runner.submit(maker.plan({3: 1}))
    assert len(runner.finish().tokens) == 4
    runner.reset(1)


def test_a_step_is_submitted_before_the_last_stage_has_computed_it(
    tiny: Path, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the first stage computes the next plan meanwhile; the result comes by the descriptor."""

    may_go = threading.Event()
    original: Callable[..., None] = StageSteps.compute

    def compute(self: StageSteps, step: Any) -> None:
        assert may_go.wait(60)
        original(self, step)

    monkeypatch.setattr(StageSteps, "compute", compute)
    with ThreadStages.open(tiny, 2, compiled=is_compiled, **PAGES) as stages:
        runner = Runner(stages.executor, stages.slots, max_num_batched_tokens=256)
        maker = PlanMaker(_never)
        for slot in (1, 2):
            maker.open(slot, [slot, 2, 3])
            runner.submit(maker.plan({slot: 3}))
        assert runner.completions is not None
        poll = select.poll()
        poll.register(runner.completions, select.POLLIN)
        assert (runner.num_pending, poll.poll(0)) == (2, [])
        may_go.set()
        assert poll.poll(60_000)
        results = [runner.finish(), runner.finish()]
    assert [result.number for result in results] == [1, 2]
    assert all(result.step_us > 0 for result in results)
