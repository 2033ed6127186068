"""Log-probabilities of prompts and of named ids against float64, and how they are cut in slices.

By torch, as on a GPU, and by NumPy, as on a CPU.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpu.cpu import scores as cpu_scores
from gpu.sampling import prompt_logprobs, prompt_scores
from gpu.sampling.prompt_logprobs import PromptSpan, in_rows, peak_bytes, prompt_piece
from gpu.slots import SlotTable
from trioserve.protocol.sampling import SamplerParams
from trioserve.protocol.wire import OpenSlot, Plan, PromptPiece, floats, from_ints, ints

VOCAB = 1000
STATES = 12
IDS = [3, VOCAB - 1, VOCAB, 3]
REPORTS = ("logprobs", "ranks", "top_ids", "top_logprobs", "ids_logprobs")


class Head:
    """A head that notes how many rows it is asked for at a time."""

    def __init__(self, *, coarse: bool = False, scale: float = 4.0) -> None:
        generator = torch.Generator().manual_seed(1)
        self._weight = torch.randn(16, VOCAB, generator=generator) * scale / 4
        self.hidden = torch.randn(STATES + 5, 16, generator=generator)
        self._coarse = coarse
        self.rows: list[int] = []

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        self.rows.append(len(hidden))
        logits = hidden @ self._weight
        # Rounded to a few values, most of which occur often, zeros of both signs among them.
        return logits.div(4).round().mul(4) if self._coarse else logits


def span_of(start: int = 1, **params: object) -> PromptSpan:
    """Return positions from ``start`` on of a slot with a little longer prompt."""
    tokens = np.random.default_rng(2).integers(0, VOCAB, STATES + 1)
    table = SlotTable(num_pages=4, page_size=16, max_model_len=64, vocab_size=VOCAB)
    opened = OpenSlot(
        slot=5,
        generation=1,
        tokens=from_ints(tokens),
        prompt_length=len(tokens),
        computed=0,
        pages=b"",
        sampler=SamplerParams(**params),  # type: ignore[arg-type]
        prompt_logprobs_from=start,
    )
    table.apply(Plan(number=1, opened=[opened]))
    return PromptSpan(slot=table[5], start=start, stop=STATES + 1, first_hidden=start + 2)


def score(span: PromptSpan, head: Head, by: str) -> PromptPiece:
    if by == "torch":
        scores = prompt_scores.score_prompt(span, head.hidden, head, VOCAB)
        return prompt_piece(span, [score.numpy() for score in scores])
    return prompt_piece(
        span, cpu_scores.score_prompt(span, head.hidden, lambda part: head(part).numpy(), VOCAB)
    )


pytestmark = pytest.mark.parametrize("by", ["torch", "numpy"])


def check(piece: PromptPiece, span: PromptSpan, head: Head, *, top: int) -> None:
    """Against float64, one token at a time."""
    assert (piece.slot, piece.start) == (5, span.start)
    count = span.stop - span.start
    logits = head(head.hidden[span.first_hidden :][:count])
    raw = logits.double().log_softmax(dim=1)
    tokens = span.slot.tokens[span.start :].tolist()
    top_ids = ints(piece.top_ids).reshape(count, top)
    top_logprobs = floats(piece.top_logprobs).reshape(count, top)
    of_ids = floats(piece.ids_logprobs).reshape(count, len(span.slot.sampler.logprob_token_ids))
    for i, token in enumerate(tokens):
        assert floats(piece.logprobs)[i] == pytest.approx(float(raw[i, token]), abs=1e-5)
        assert ints(piece.ranks)[i] == 1 + int((logits[i] > logits[i, token]).sum())
        order = np.argsort(-logits[i].numpy(), kind="stable")[:top]
        assert top_ids[i].tolist() == order.tolist()
        assert top_logprobs[i] == pytest.approx(raw[i, order].numpy(), abs=1e-5)
        for id, value in zip(span.slot.sampler.logprob_token_ids, of_ids[i], strict=True):
            wanted = float(raw[i, id]) if id < VOCAB else -np.inf
            assert value == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("top", [0, 1, 20, VOCAB])
def test_against_float64(coarse: bool, top: int, by: str) -> None:
    head = Head(coarse=coarse)
    span = span_of(prompt_logprobs=top, logprob_token_ids=IDS)
    check(score(span, head, by), span, head, top=top)


def test_more_than_the_vocabulary_gives_all_of_it(by: str) -> None:
    head = Head()
    span = span_of(start=9, prompt_logprobs=VOCAB + 1)
    check(score(span, head, by), span, head, top=VOCAB)


def test_logits_of_a_few_tokens_exist_at_a_time(monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    monkeypatch.setattr(prompt_logprobs, "SLICE_BYTES", 5 * 4 * VOCAB + 3)
    monkeypatch.setattr(prompt_scores, "_TOP_BYTES", 2 * 4 * VOCAB)
    head = Head(coarse=True)
    span = span_of(prompt_logprobs=4, logprob_token_ids=IDS)
    piece = score(span, head, by)
    assert head.rows == [5, 5, 2]
    check(piece, span, head, top=4)


def test_a_vocabulary_larger_than_a_slice_goes_token_by_token(
    monkeypatch: pytest.MonkeyPatch,
    by: str,
) -> None:
    monkeypatch.setattr(prompt_logprobs, "SLICE_BYTES", 1)
    head = Head()
    span = span_of(start=10, prompt_logprobs=1)
    piece = score(span, head, by)
    assert head.rows == [1, 1, 1]
    check(piece, span, head, top=1)


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors made under it at a time; operations' own scratch isn't seen."""

    def __init__(self) -> None:
        super().__init__()
        self._holders: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._sizes and func.is_view:
                    continue  # of something that was there before
                self._holders[storage.data_ptr()] += 1
                self._sizes[storage.data_ptr()] = storage.nbytes()
                weakref.finalize(tensor, self._release, storage.data_ptr())
        self.peak = max(self.peak, sum(self._sizes.values()))
        return result

    def _release(self, address: int) -> None:
        self._holders[address] -= 1
        if not self._holders[address]:
            del self._sizes[address]


@pytest.mark.parametrize("top", [0, 5])
def test_no_more_is_allocated_than_is_said(
    monkeypatch: pytest.MonkeyPatch, top: int, by: str
) -> None:
    rows = 8
    monkeypatch.setattr(prompt_logprobs, "SLICE_BYTES", rows * 4 * VOCAB)
    monkeypatch.setattr(prompt_scores, "_TOP_BYTES", rows * VOCAB)
    head, span = Head(), span_of(prompt_logprobs=top)
    with LiveBytes() as live:
        piece = score(span, head, by)
    # Reports exist in parts and joined; the rest is small change.
    reports = 3 * sum(len(getattr(piece, name)) for name in REPORTS) + 4096
    assert rows * 4 * VOCAB < live.peak <= peak_bytes(VOCAB, STATES) + reports
    assert peak_bytes(VOCAB, STATES) == 3 * rows * 4 * VOCAB
    assert peak_bytes(VOCAB, 3) == 3 * 3 * 4 * VOCAB


@pytest.mark.parametrize("slice_bytes", [1, 2 * 4 * VOCAB, 64 << 20])
def test_ids_of_some_rows(monkeypatch: pytest.MonkeyPatch, slice_bytes: int, by: str) -> None:
    monkeypatch.setattr(prompt_logprobs, "SLICE_BYTES", slice_bytes)
    head = Head()
    logits = head(head.hidden)
    before = logits.clone()
    named = {4: IDS, 0: [7], 5: [8, 9]}
    rows = np.array([4, 0, 5])
    if by == "torch":
        values = prompt_scores.logprobs_of(logits, rows, named.values()).numpy()
    else:
        values = cpu_scores.logprobs_of(logits.numpy(), rows, named.values())
    lists = in_rows(7, named, values)
    assert torch.equal(logits, before)
    raw = logits.double().log_softmax(dim=1)
    for row, found in enumerate(lists):
        wanted = [float(raw[row, id]) if id < VOCAB else -np.inf for id in named.get(row, [])]
        assert found.tolist() == pytest.approx(wanted, abs=1e-5)
