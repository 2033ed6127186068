"""Steps in torch operations on the CPU, each finished before ``submit`` returns."""

from __future__ import annotations

import time
from collections.abc import Sequence

import attrs
import numpy as np
import torch

from gpu.attention import Attention
from gpu.executor import Drawn, Submission, in_layout_order, step_layout
from gpu.models.decoder import Decoder
from gpu.sampler import Sampler, SamplerRow, UnusableLogits
from gpu.slots import Row, Slot, SlotTable

__all__ = ["CpuExecutor"]


class CpuExecutor:
    """:class:`gpu.executor.Executor` over a model, its KV cache and the torch sampler."""

    def __init__(
        self, model: Decoder, attention: Attention, sampler: Sampler, slots: SlotTable
    ) -> None:
        self._model = model
        self._attention = attention
        self._sampler = sampler
        self._slots = slots
        self._step_ended_ns = time.perf_counter_ns()

    @property
    def completions(self) -> None:
        """See :attr:`gpu.executor.Executor.completions`."""
        return None

    def open(self, slot: Slot) -> None:
        """See :meth:`gpu.executor.Executor.open`: everything is read from the slots themselves."""

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
        self._attention.begin(layout)
        hidden = self._model.forward(torch.from_numpy(tokens.astype(np.int64)), self._attention)
        if not sampling:
            return _nothing()
        last = {id(row): end - 1 for row, end in zip(ordered, layout.query_start[1:], strict=True)}
        sampled_from = torch.tensor([last[id(row)] for row in sampling])
        logits = self._model.logits(hidden.index_select(0, sampled_from))
        return self._sample(logits, sampling)

    def _sample(self, logits: torch.Tensor, rows: list[Row]) -> Drawn:
        asked = [
            SamplerRow(row.slot.sampler, row.slot.tokens, row.slot.prompt_length) for row in rows
        ]
        try:
            sampled = self._sampler.sample(logits, asked)
        except UnusableLogits as error:
            unusable = np.zeros(len(rows), dtype=np.int32)
            unusable[error.row] = -1
            return attrs.evolve(_nothing(), tokens=unusable)
        return Drawn(
            tokens=sampled.tokens.numpy().astype(np.int32),
            logprobs=None if sampled.logprobs is None else sampled.logprobs.numpy(),
            top=sampled.top,
            step_us=0,
            idle_us=0,
        )


@attrs.frozen
class _Finished:
    _drawn: Drawn

    def wait(self) -> Drawn:
        return self._drawn


def _nothing() -> Drawn:
    return Drawn(tokens=np.zeros(0, dtype=np.int32), logprobs=None, top=None, step_us=0, idle_us=0)
