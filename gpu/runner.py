"""One plan to one result: plan, input tensors, model, sampler, tokens.

The model and the sampler are separate calls. The last token of every slot stays on the device,
where the next plan takes it from; its copy to the host comes after.
"""

from __future__ import annotations

import math
import time

import attrs
import numpy as np
import torch

from gpu.attention import Attention, StepLayout
from gpu.models.decoder import Decoder
from gpu.sampler import Sampled, Sampler, SamplerRow, UnusableLogits
from gpu.slots import PlanError, Row, SlotTable
from trioserve.wire import Plan, StepResult, from_floats, from_ints

__all__ = ["Runner"]


@attrs.frozen
class _Inputs:
    tokens: torch.Tensor  # [T] int64, on the device
    layout: StepLayout
    sampled_from: torch.Tensor  # [S] int64: the last token of each row that samples


class Runner:
    """Runs plans against one model. The slots and the KV cache are its only state."""

    def __init__(
        self,
        model: Decoder,
        attention: Attention,
        sampler: Sampler,
        slots: SlotTable,
        *,
        max_num_batched_tokens: int,
    ) -> None:
        self._model = model
        self._attention = attention
        self._sampler = sampler
        self._slots = slots
        self._max_num_batched_tokens = max_num_batched_tokens
        self._last_tokens = torch.zeros(0, dtype=torch.int64, device=model.device)  # [slots]
        self._next_plan: int | None = None
        self._failed = False
        self._step_ended_ns = time.perf_counter_ns()
        self.num_steps = 0

    @property
    def slots(self) -> SlotTable:
        """The sequences that are open."""
        return self._slots

    def reset(self, next_plan: int) -> None:
        """Forget every slot and any failure; the next plan is number ``next_plan``."""
        self._slots.clear()
        self._next_plan = next_plan
        self._failed = False

    def step(self, plan: Plan) -> StepResult:
        """Run one plan.

        After an exception every plan is refused until :meth:`reset`.

        Raises:
            PlanError: the plan can't be run, or one of its rows has no token to draw.
        """
        began = time.perf_counter_ns()
        if self._failed:
            raise PlanError("an earlier plan failed and no Reset has come since")
        self._failed = True
        if self._next_plan is not None and plan.number != self._next_plan:
            raise PlanError(f"plan {plan.number} came where {self._next_plan} was due")
        with torch.inference_mode():
            rows = self._slots.apply(plan)
            self._note_opened(plan)
            sampling, sampled = self._compute(rows)
        result = _finish(plan.number, rows, sampling, sampled)
        ended = time.perf_counter_ns()
        result = attrs.evolve(
            result,
            step_us=(ended - began) // 1000,
            idle_us=(began - self._step_ended_ns) // 1000,
        )
        self._next_plan = plan.number + 1
        self._step_ended_ns = ended
        self.num_steps += 1
        self._failed = False
        return result

    def _note_opened(self, plan: Plan) -> None:
        """Put the last token of each new slot where the rows that sample look for it."""
        missing = len(self._slots.block_tables) - len(self._last_tokens)
        if missing > 0:
            self._last_tokens = torch.cat([self._last_tokens, self._last_tokens.new_zeros(missing)])
        for slot in (self._slots[opened.slot] for opened in plan.opened):
            self._last_tokens[slot.number] = int(slot.tokens[-1])

    def _compute(self, rows: list[Row]) -> tuple[list[Row], Sampled | None]:
        """Forward and sampling. Returns the rows that sampled, and what they drew."""
        # The layout wants rows of one token first, longest context first.
        active = sorted((row for row in rows if row.count), key=lambda r: (r.count > 1, -r.end))
        if not active:
            return [], None
        inputs = self._inputs(active)
        self._attention.begin(inputs.layout)
        hidden = self._model.forward(inputs.tokens, self._attention)
        for row in active:
            row.slot.computed = row.end
        sampling = [row for row in active if row.samples]
        if not sampling:
            return [], None
        logits = self._model.logits(hidden.index_select(0, inputs.sampled_from))
        sampled = self._sample(logits, sampling)
        self._last_tokens[[row.slot.number for row in sampling]] = sampled.tokens
        return sampling, sampled

    def _inputs(self, rows: list[Row]) -> _Inputs:
        device = self._model.device
        counts = np.array([row.count for row in rows])
        query_start = np.concatenate([[0], counts.cumsum()])
        total = int(query_start[-1])
        if total > self._max_num_batched_tokens:
            raise PlanError(f"{total} tokens in one plan, over {self._max_num_batched_tokens}")
        starts = np.array([row.start for row in rows])
        positions = np.arange(total) + np.repeat(starts - query_start[:-1], counts)
        known = np.concatenate([row.slot.tokens[row.start : row.end] for row in rows])
        tokens = torch.from_numpy(known.astype(np.int64)).to(device)
        ends = [index for index, row in enumerate(rows) if row.samples]
        sampled_from = torch.from_numpy(query_start[1:][ends] - 1).to(device)
        last = self._last_tokens[[rows[index].slot.number for index in ends]]
        tokens.index_copy_(0, sampled_from, last)
        width = max(row.slot.num_pages for row in rows)
        tables = self._slots.block_tables[[row.slot.number for row in rows], :width]
        layout = StepLayout(
            positions=torch.from_numpy(positions).to(device),
            query_start=query_start.tolist(),
            context_lens=[row.end for row in rows],
            block_tables=torch.from_numpy(tables).to(device),
            num_decode_rows=int((counts == 1).sum()),
        )
        return _Inputs(tokens, layout, sampled_from)

    def _sample(self, logits: torch.Tensor, rows: list[Row]) -> Sampled:
        asked = [
            SamplerRow(row.slot.sampler, row.slot.tokens, row.slot.prompt_length) for row in rows
        ]
        try:
            return self._sampler.sample(logits, asked)
        except UnusableLogits as error:
            slot = rows[error.row].slot.number
            raise PlanError(
                f"slot {slot}: the model's logits leave no token to draw", slot
            ) from error


def _finish(
    number: int, rows: list[Row], sampling: list[Row], sampled: Sampled | None
) -> StepResult:
    """Append the tokens drawn to their slots, and say them in the order of the plan's rows."""
    drawn = {row.slot.number: index for index, row in enumerate(sampling)}
    tokens = sampled.tokens.tolist() if sampled else []
    logprobs = sampled.logprobs.tolist() if sampled and sampled.logprobs is not None else None
    top = sampled.top if sampled else None
    order = [drawn[row.slot.number] for row in rows if row.slot.number in drawn]
    for row, token in zip(sampling, tokens, strict=True):
        row.slot.append(token)
    given = [row.slot.number in drawn for row in rows]
    result = StepResult(
        number=number,
        slots=from_ints([row.slot.number for row in rows]),
        generations=from_ints([row.slot.generation for row in rows]),
        offsets=from_ints(np.cumsum([0, *given])),
        tokens=from_ints([tokens[index] for index in order]),
        logprobs=from_floats([logprobs[i] if logprobs else math.nan for i in order]),
    )
    if top is None:
        return result
    entries = [top[index] for index in order]
    return attrs.evolve(
        result,
        top_offsets=from_ints(np.cumsum([0, *(len(ids) for ids, _ in entries)])),
        top_ids=from_ints(np.concatenate([ids for ids, _ in entries])),
        top_logprobs=from_floats(np.concatenate([values for _, values in entries])),
    )
