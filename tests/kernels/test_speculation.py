"""Drafts over kernels: the same tokens as without, in fewer steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from gpu.constraints.adjuster import Constraints
from gpu.constraints.grammar_cache import GrammarCache
from gpu.constraints.grammars import GrammarVocabulary
from gpu.cuda.speculation import SpeculativeExecutor
from gpu.executor import Copies
from gpu.kernels import KernelLoader
from gpu.runner import Runner
from gpu.sampling.drafting.drafter import Drafter
from gpu.sampling.drafting.sources import AskedDraft, Draft, DraftKind
from gpu.sampling.drafting.step_times import StepTimes
from gpu.slots import Row, Slot
from tests.kernels.serving import Server
from tests.support.lora_adapters import make_adapter
from tests.support.plans import PlanMaker
from tests.support.tiny_models import make_tiny
from trioserve.model_files import open_model
from trioserve.protocol.grammar import Grammar
from trioserve.protocol.sampling import SamplerParams
from trioserve.protocol.speculation import SpeculativeConfig
from trioserve.protocol.wire import StepResult, floats, ints

EOS = 2
PATTERN = "[a-f]{2,9}(, [g-k]+)*x"
PLAIN = [
    SamplerParams(temperature=0.0, logprobs=3),
    SamplerParams(
        seed=11, temperature=0.8, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.3,
        logit_bias={17: 2.0}, logprobs=0, logprob_token_ids=[5, 6],
    ),
    SamplerParams(seed=3, top_k=40, top_p=0.95, frequency_penalty=0.3),
]  # fmt: skip
ADJUSTED = [
    SamplerParams(seed=7, stop_ids=[EOS], grammar=Grammar("regex", PATTERN), logprobs=2),
    SamplerParams(temperature=0.0, allowed_token_ids=[40, 41, 42], bad_words=[[40, 41], [42]]),
]
NUM_TOKENS = 14
MAX_DRAFTS = 3


@attrs.define
class PlannedDrafts:
    """A source that drafts ``outputs``, by slot, with every fifth token wrong."""

    outputs: Sequence[Sequence[int]]
    num_drafts: int = 0

    def look_up(self, asked: Mapping[int, AskedDraft]) -> dict[int, Draft]:
        drafts = {}
        for i, each in asked.items():
            slot = each.slot
            begin = slot.num_tokens - slot.prompt_length
            tokens = [
                (token + (place % 5 == 4)) % 300
                for place, token in enumerate(self.outputs[slot.number])
            ][begin : begin + each.most]
            if tokens:
                self.num_drafts += len(tokens)
                drafts[i] = Draft(tokens, 1, DraftKind.MODEL)
        return drafts

    def open(self, slot: Slot) -> None:
        pass

    def close(self, number: int) -> None:
        pass

    def copy_pages(self, copies: Copies) -> None:
        pass

    def note_pages(self, rows: Sequence[Row]) -> None:
        pass

    def seconds(self, num_rows: int) -> float:
        return 0.0


@attrs.define
class Outputs:
    """All that slots got: their tokens, and what was reported of them."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    top: list[tuple[int, float]]
    named: list[float]
    num_steps: int

    @classmethod
    def of(cls, results: Sequence[StepResult], num_slots: int) -> Outputs:
        made = cls([[] for _ in range(num_slots)], [[] for _ in range(num_slots)], [], [], 0)
        top: dict[int, list[tuple[int, float]]] = {}
        named: dict[int, list[float]] = {}
        for result in results:
            made.num_steps += 1
            made._add(result, top, named)
        made.top = [each for slot in sorted(top) for each in top[slot]]
        made.named = [each for slot in sorted(named) for each in named[slot]]
        return made

    def _add(self, result: StepResult, top: Any, named: Any) -> None:
        offsets, tokens = ints(result.offsets).tolist(), ints(result.tokens).tolist()
        logprobs = floats(result.logprobs).tolist()
        top_offsets, ids_offsets = ints(result.top_offsets), ints(result.ids_offsets)
        for row, slot in enumerate(ints(result.slots).tolist()):
            for place in range(offsets[row], offsets[row + 1]):
                self.tokens[slot].append(tokens[place])
                self.logprobs[slot].append(logprobs[place])
                if len(top_offsets):
                    a, b = top_offsets[place : place + 2]
                    ids, values = ints(result.top_ids)[a:b], floats(result.top_logprobs)[a:b]
                    pairs = zip(ids.tolist(), values.tolist(), strict=True)
                    top.setdefault(slot, []).extend(pairs)
                if len(ids_offsets):
                    a, b = ids_offsets[place : place + 2]
                    named.setdefault(slot, []).extend(floats(result.ids_logprobs)[a:b].tolist())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama3", tmp_path_factory.mktemp("llama"), head_dim=64)


@pytest.fixture(scope="module")
def grammars(folder: Path) -> Iterator[GrammarCache]:
    cache = GrammarCache(GrammarVocabulary.of(open_model(folder)))
    cache.prepare(Grammar("regex", PATTERN))
    yield cache
    cache.close()


@attrs.define
class Served:
    """A server for one run: ``step`` computes and ``results`` keeps what it gave."""

    runner: Runner
    maker: PlanMaker
    results: list[StepResult] = attrs.field(factory=list)

    def step(self, rows: dict[int, int]) -> None:
        result = self.runner.step(self.maker.plan(rows))
        self.results.append(result)
        self.maker.accept(result)
        for slot in rows:
            known = self.maker.slots[slot]
            known.computed = min(known.computed, len(known.tokens) - 1)


def serve(
    folder: Path,
    loader: KernelLoader,
    params: Sequence[SamplerParams],
    drafts: PlannedDrafts | None,
    **options: Any,
) -> Outputs:
    """Return what the slots get; the last one's prompt is computed beside drafts of the others."""
    max_rows = 8
    server = Server.of(folder, loader, max_num_seqs=max_rows, drafts=drafts is not None, **options)
    executor: Any = server.executor
    if drafts is not None:
        server.runner.slots.max_row_tokens = MAX_DRAFTS + 1
        config = SpeculativeConfig(adaptive=False)
        drafter = Drafter(config, StepTimes({1: 1.0, 2: 1.0}), drafts)
        executor = SpeculativeExecutor(executor, drafter, max_rows)
    served = Served(Runner(executor, server.runner.slots, max_num_batched_tokens=128), server.maker)
    last = len(params) - 1
    for slot, each in enumerate(params):
        prompt = [5 + slot, 9, 17] * (1 if slot < last else 9)
        served.maker.open(slot, prompt, each, adapter=int("adapters" in options and slot == 1))
    served.step(dict.fromkeys(range(last), 3))
    while any(not done(served, slot) for slot in range(len(params))):
        rows: dict[int, int] = {}
        for slot in range(len(params)):
            known = served.maker.slots[slot]
            missing = len(known.tokens) - known.computed
            if done(served, slot):
                continue
            if missing > 1:
                rows[slot] = min(missing, 10)
            else:
                left = NUM_TOKENS - (len(known.tokens) - served.runner.slots[slot].prompt_length)
                rows[slot] = 1 if drafts is None else min(1 + MAX_DRAFTS, left)
        served.step(rows)
    return Outputs.of(served.results, len(params))


def done(served: Served, number: int) -> bool:
    slot = served.runner.slots[number]
    return slot.stopped or slot.num_tokens - slot.prompt_length >= NUM_TOKENS


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("kind", ["plain", "adjusted", "adapters"])
def test_outputs_are_those_without_drafts(
    folder: Path,
    loader: KernelLoader,
    grammars: GrammarCache,
    tmp_path: Path,
    graphs: bool,
    kind: str,
) -> None:
    params = [*PLAIN, *ADJUSTED] if kind == "adjusted" else PLAIN
    options: dict[str, Any] = {"graphs": graphs, "batch_invariant_attention": True}
    if kind == "adapters":
        options["adapters"] = [make_adapter(folder, tmp_path / "adapter", seed=1, rank=4, alpha=8)]
    adjuster = {"adjuster": Constraints(300, grammars)}
    plain = serve(folder, loader, params, None, **options, **adjuster)
    drafts = PlannedDrafts(plain.tokens)
    drafted = serve(folder, loader, params, drafts, **options, **adjuster)
    assert drafted.tokens == plain.tokens
    assert drafts.num_drafts > NUM_TOKENS
    assert drafted.num_steps < plain.num_steps
    for mine, expected in zip(drafted.logprobs, plain.logprobs, strict=True):
        np.testing.assert_array_equal(mine, expected)
    assert drafted.top == plain.top
    assert drafted.named == plain.named
