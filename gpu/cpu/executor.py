"""Steps on the CPU, each finished before ``submit`` returns."""

from __future__ import annotations

import time
from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt
import torch

from gpu.adjustments import Adjuster, NoAdjuster
from gpu.cpu.model import CpuModel
from gpu.executor import Drawn, Submission, in_layout_order, step_layout
from gpu.extras import SlotExtras
from gpu.prompt_logprobs import PromptSpan, in_rows, logprobs_of, prompt_piece, score_prompt
from gpu.sampler import Sampler, SamplerRow, is_plainly_greedy
from gpu.slots import Row, Slot, SlotTable
from trioserve.wire import PromptPiece

__all__ = ["CpuExecutor"]


class CpuExecutor:
    """:class:`gpu.executor.Executor` over a model with its KV cache, and the torch sampler."""

    def __init__(
        self,
        model: CpuModel,
        sampler: Sampler,
        slots: SlotTable,
        adjuster: Adjuster | None = None,
    ) -> None:
        self._model = model
        self._sampler = sampler
        self._slots = slots
        self._extras = SlotExtras(adjuster or NoAdjuster())
        self._choosy: set[int] = set()
        """Slots whose tokens aren't just the most probable ones."""
        self._step_ended_ns = time.perf_counter_ns()

    @property
    def completions(self) -> None:
        """See :attr:`gpu.executor.Executor.completions`."""
        return None

    def open(self, slot: Slot) -> None:
        """See :meth:`gpu.executor.Executor.open`."""
        self._extras.open(slot)
        if is_plainly_greedy(slot.sampler) and not self._extras.adjusts_slot(slot.number):
            self._choosy.discard(slot.number)
        else:
            self._choosy.add(slot.number)

    def close(self, number: int) -> None:
        """See :meth:`gpu.executor.Executor.close`."""
        self._choosy.discard(number)
        self._extras.close(number)

    def submit(self, rows: Sequence[Row]) -> Submission:
        """See :meth:`gpu.executor.Executor.submit`."""
        began = time.perf_counter_ns()
        with torch.inference_mode():
            drawn = self._compute(rows)
        ended = time.perf_counter_ns()
        drawn = attrs.evolve(
            drawn,
            step_us=(ended - began) // 1000,
            idle_us=(began - self._step_ended_ns) // 1000,
        )
        self._step_ended_ns = ended
        return _Finished(drawn)

    def _compute(self, rows: Sequence[Row]) -> Drawn:
        ordered = in_layout_order(rows)
        sampling = [row for row in rows if row.samples]
        if not ordered:
            return _nothing()
        layout = step_layout(ordered, self._slots)
        tokens = np.concatenate([row.slot.tokens[row.start : row.end] for row in ordered])
        hidden = self._model.forward(tokens, layout)
        prompts = [
            self._piece(span, hidden)
            for span in self._extras.prompt_spans(ordered, layout.query_start[:-1])
        ]
        if not sampling:
            return attrs.evolve(_nothing(), prompts=prompts)
        last = {id(row): end - 1 for row, end in zip(ordered, layout.query_start[1:], strict=True)}
        sampled_from = np.array([last[id(row)] for row in sampling])
        if not any(row.slot.number in self._choosy for row in sampling):
            best = self._model.most_probable(hidden, sampled_from)
            if best is not None:
                return attrs.evolve(_nothing(), tokens=best, prompts=prompts)
        return self._sample(self._model.logits(hidden, sampled_from), sampling, prompts)

    def _piece(self, span: PromptSpan, hidden: torch.Tensor) -> PromptPiece:
        scores = score_prompt(span, hidden, self._model.logits, self._sampler.vocab_size)
        return prompt_piece(span, [score.numpy() for score in scores])

    def _sample(self, logits: torch.Tensor, rows: list[Row], prompts: list[PromptPiece]) -> Drawn:
        asked = [
            SamplerRow(row.slot.sampler, row.slot.tokens, row.slot.prompt_length) for row in rows
        ]
        adjustment = self._extras.adjustment(logits, rows) if self._extras.adjusts(rows) else None
        named = self._named(logits, rows)  # before the sampler overwrites the logits
        sampled = self._sampler.sample(logits, asked, adjustment)
        return Drawn(
            tokens=sampled.tokens.numpy().astype(np.int32),
            logprobs=None if sampled.logprobs is None else sampled.logprobs.numpy(),
            top=sampled.top,
            named=named,
            prompts=prompts,
            step_us=0,
            idle_us=0,
        )

    def _named(self, logits: torch.Tensor, rows: list[Row]) -> list[npt.NDArray[np.float32]] | None:
        named = self._extras.named_ids(rows)
        if not named:
            return None
        values = logprobs_of(logits, np.array(list(named)), named.values())
        return in_rows(len(rows), named, values.numpy())


@attrs.frozen
class _Finished:
    _drawn: Drawn

    @property
    def deferred(self) -> bool:
        return False

    def sample(self) -> None:
        raise AssertionError("a step on the CPU is finished at once")

    def wait(self) -> Drawn:
        return self._drawn


def _nothing() -> Drawn:
    return Drawn(tokens=np.zeros(0, dtype=np.int32), logprobs=None, top=None, step_us=0, idle_us=0)
