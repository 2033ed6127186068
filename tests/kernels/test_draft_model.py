"""A draft model over kernels: the same tokens as without, and drafts that are its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu.constraints.adjuster import Constraints
from gpu.constraints.grammar_cache import GrammarCache
from gpu.cuda.draft_model import CudaDraftModel
from gpu.kernels import KernelLoader
from gpu.kernels.emulation import EmulatedLoader
from gpu.sampling.drafting.draft_model import DraftModelSource
from gpu.sampling.drafting.sources import AskedDraft, Draft
from gpu.sampling.drafting.step_times import StepTimes
from gpu.slots import Row
from tests.kernels.drafted import (
    ADJUSTED,
    NUM_TOKENS,
    PLAIN,
    PREFIX,
    Drafts,
    open_grammars,
    serve,
    start,
)
from tests.kernels.fake_cuda.gpu import FakeGpu
from tests.kernels.serving import NUM_PAGES, PAGE_SIZE, Server
from tests.support.lora_adapters import make_adapter
from tests.support.tiny_models import make_tiny
from trioserve.protocol.sampling import SamplerParams

GREEDY = SamplerParams(temperature=0.0, logprobs=1)
WARM = SamplerParams(temperature=0.7, seed=5, logprobs=1)
"""Refuses some of the most probable tokens."""
HOT = SamplerParams(temperature=1.5, seed=6, logprobs=1)
"""Refuses nearly all."""


class RecordedSource(DraftModelSource):
    """A source that keeps what it drafted: slot, number of tokens before the drafts, drafts."""

    drafted: list[tuple[int, int, list[int]]]

    def look_up(self, asked: Mapping[int, AskedDraft]) -> dict[int, Draft]:
        found = super().look_up(asked)
        for i, draft in found.items():
            slot = asked[i].slot
            self.drafted.append((slot.number, slot.num_tokens, draft.tokens))
        return found


def drafts_of(folder: Path, recorded: list[tuple[int, int, list[int]]] | None = None) -> Drafts:
    """Return the drafts of the model in ``folder``; what they are is appended to ``recorded``."""

    def make(server: Server) -> tuple[DraftModelSource, CudaDraftModel]:
        model = server.draft_model(folder)
        source = RecordedSource(
            model,
            server.runner.slots,
            vocab_size=300,
            page_size=PAGE_SIZE,
            num_pages=NUM_PAGES + 2,
            max_tokens=20,
            step_times=StepTimes({1: 1.0}),
        )
        source.drafted = [] if recorded is None else recorded
        return source, model

    return make


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama3", tmp_path_factory.mktemp("llama"), head_dim=64)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of another shape with other weights."""
    return make_tiny(
        "qwen3", tmp_path_factory.mktemp("other"), seed=1, head_dim=64, num_hidden_layers=1
    )


@pytest.fixture(scope="module")
def grammars(folder: Path) -> Iterator[GrammarCache]:
    with open_grammars(folder) as cache:
        yield cache


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("kind", ["plain", "adjusted", "adapters"])
def test_outputs_are_those_without_drafts(
    folder: Path,
    other: Path,
    loader: KernelLoader,
    grammars: GrammarCache,
    tmp_path: Path,
    graphs: bool,
    kind: str,
) -> None:
    """A request is preempted, one is closed and another begins in its slot with a shared page."""
    params = [*PLAIN, *ADJUSTED] if kind == "adjusted" else [*PLAIN, WARM]
    options: dict[str, Any] = {
        "graphs": graphs,
        "adjuster": Constraints(300, grammars),
        "interrupted": True,
    }
    if kind == "adapters":
        options["adapters"] = [make_adapter(folder, tmp_path / "adapter", seed=1, rank=4, alpha=8)]
    plain = serve(folder, loader, params, **options)
    for model in (folder, other):
        drafted = serve(folder, loader, params, drafts_of(model), **options)
        assert drafted.outputs == plain.outputs
        assert drafted.num_drafted > NUM_TOKENS
        assert drafted.num_accepted or model == other


@pytest.mark.parametrize("graphs", [False, True])
def test_all_drafts_of_the_model_itself_are_accepted(
    folder: Path, loader: KernelLoader, graphs: bool
) -> None:
    options: dict[str, Any] = {"graphs": graphs}
    drafted = serve(folder, loader, [GREEDY, GREEDY], drafts_of(folder), **options)
    assert drafted.num_drafted > 0
    assert drafted.num_accepted == drafted.num_drafted


def test_drafts_of_random_weights_are_refused(
    folder: Path, other: Path, loader: KernelLoader
) -> None:
    params = [GREEDY, WARM, GREEDY]
    plain = serve(folder, loader, params)
    drafted = serve(folder, loader, params, drafts_of(other))
    assert drafted.outputs == plain.outputs
    assert drafted.num_accepted < drafted.num_drafted / 10


def wrong_drafts(folder: Path, loader: KernelLoader, **options: Any) -> int:
    """Return how many drafts of the model itself aren't what it finds most probable there."""
    recorded: list[tuple[int, int, list[int]]] = []
    params = [GREEDY, WARM, HOT]
    run = serve(
        folder,
        loader,
        params,
        drafts_of(folder, recorded),
        **options,
    )
    assert 0 < run.num_accepted < run.num_drafted
    wrong = checked = 0
    for slot, num_tokens, drafts in recorded:
        output = run.outputs[slot]
        first = num_tokens - run.lengths[slot]
        for depth, draft in enumerate(drafts[: len(output.tokens) - first]):
            (best,), _ = output.top[first + depth]
            wrong += draft != best
            checked += 1
            if draft != output.tokens[first + depth]:
                break
    assert checked > NUM_TOKENS
    return wrong


@pytest.mark.parametrize("graphs", [False, True])
def test_refused_drafts_are_forgotten(folder: Path, loader: KernelLoader, graphs: bool) -> None:
    assert wrong_drafts(folder, loader, graphs=graphs) == 0


def kept_although_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(self: DraftModelSource, opened: Any) -> None:
        kept = opened.num_ready + max(len(opened.drafted) - 1, 0)
        opened.num_ready = min(kept, opened.slot.num_tokens - 1)
        opened.drafted = []

    monkeypatch.setattr(DraftModelSource, "_keep_accepted", keep)


def tokens_left_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = CudaDraftModel._queue
    monkeypatch.setattr(
        CudaDraftModel, "_queue", lambda self, rows, from_host=(): queue(self, rows)
    )


def drafts_of_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def draft_row(row: Any, depth: int) -> Any:
        return Row(slot=row.slot, start=row.end + max(depth - 2, 0), count=1, samples=True)

    monkeypatch.setattr("gpu.cuda.draft_model.draft_row", draft_row)


@pytest.mark.parametrize(
    "mistake", [kept_although_refused, tokens_left_on_the_host, drafts_of_the_step_before]
)
def test_a_planted_mistake_is_noticed(
    folder: Path, loader: KernelLoader, monkeypatch: pytest.MonkeyPatch, mistake: Any
) -> None:
    mistake(monkeypatch)
    assert wrong_drafts(folder, loader) > 0


def drafts_over_moved_pages(folder: Path, loader: KernelLoader) -> tuple[int, int]:
    """Return the drafts of a request whose first pages were on the host, and those accepted."""
    run = start([GREEDY] * 3, folder, loader, drafts_of(folder), num_host_pages=2)
    maker = run.maker
    prompts = [PREFIX[::-1] + PREFIX, PREFIX + PREFIX[::-1]]
    for request, prompt in enumerate(prompts):
        run.open(request, request, prompt)
    while run.step(3):
        pass
    assert run.num_accepted == run.num_drafted > 0
    pages, others = maker.slots[0].pages[:2], maker.slots[1].pages[:2]
    moved = [maker.free.pop(0) for _ in pages]
    for request in (0, 1):
        maker.close(run.slots.pop(request))
    places = [NUM_PAGES, NUM_PAGES + 1]
    for sources, destinations in ((pages, places), (others, pages), (places, moved)):
        maker.copies += zip(sources, destinations, strict=True)
    run.open(2, 0, prompts[0], shared_pages=moved)
    before = run.num_drafted
    while run.step(3):
        pass
    assert run.outputs[2].tokens == run.outputs[0].tokens
    return run.num_drafted - before, run.num_accepted - before


def test_pages_of_a_draft_model_go_to_the_host_and_come_back(
    folder: Path, loader: KernelLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafted, accepted = drafts_over_moved_pages(folder, loader)
    assert drafted == accepted > 0
    copy_pages = CudaDraftModel.copy_pages

    def copy_others(self: CudaDraftModel, copies: Any) -> None:
        # Without any copy, the memory of the run before might be used again, and be right.
        copy_pages(self, np.stack([copies[::-1, 0], copies[:, 1]], axis=1))

    monkeypatch.setattr(CudaDraftModel, "copy_pages", copy_others)
    assert drafts_over_moved_pages(folder, loader)[1] < accepted


PACES = [(0.0, True), (0.3, True), (0.6, False)]
"""Shares of the work that the device does before it must, and if that of outputs is among it."""


def test_drafts_are_queued_ahead_of_the_device(folder: Path, gpu: FakeGpu) -> None:
    """Whatever the device has done, each step reads what the one before it drew."""
    params = [GREEDY, WARM, HOT]
    options: dict[str, Any] = {"graphs": True}
    expected = serve(folder, EmulatedLoader(), params, drafts_of(folder), **options)
    for seed, (pace, outputs_too) in enumerate(PACES):

        def prepare(
            server: Server, seed: int = seed, pace: float = pace, too: bool = outputs_too
        ) -> None:
            gpu.queue.restart(seed, pace, None if too else gpu.queue.streams[-1])

        run = serve(folder, gpu.loader, params, drafts_of(folder), prepare=prepare, **options)
        assert run.outputs == expected.outputs
        assert (run.num_drafted, run.num_accepted) == (expected.num_drafted, expected.num_accepted)
        # The host waits where three steps are queued, so that the device always has work.
        assert gpu.queue.stalls.keys() <= {"cudaEventSynchronize"}
