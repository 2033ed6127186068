"""Turns plans into results: checks a plan, applies it to the slots, and has an executor compute it.

A plan may be submitted before the result of the previous one is known. Its rows are known anyway,
because a sampling row gets exactly one token. Unknown is only whether that token ends its sequence;
if so, the next row is computed in vain and its token dropped. A row with draft tokens may get
several; its slot has no row in another plan until they are known.

A mask may need a token that isn't known yet. The plan is submitted anyway, but its sampling is
deferred until every earlier plan is finished. Until then no other plan is accepted.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np

from gpu.executor import Executor, Submission
from gpu.sampling.drawn import Drawn
from gpu.slots import PlanError, Row, SlotTable
from trioserve.protocol.wire import Plan, StepResult, from_floats, from_ints, ints

_NAN = from_floats([math.nan])
_log = logging.getLogger("gpu.runner")


@attrs.define
class _Pending:
    """A submitted plan, and the positions of the tokens that it samples."""

    number: int
    rows: list[Row]
    submission: Submission
    positions: dict[int, int] = attrs.field(factory=dict)
    """Slot number -> position of the token that its row samples; empty while that is deferred."""
    error: Exception | None = None
    """Exception raised when its deferred sampling began."""

    def append_unknown(self) -> None:
        """Append an unknown token to each slot that samples."""
        sampling = (row.slot for row in self.rows if row.samples)
        self.positions = {slot.number: slot.extend() for slot in sampling}


class Runner:
    """Runs plans on one executor. The slots are its only state besides the plans in flight."""

    def __init__(
        self, executor: Executor, slots: SlotTable, *, max_num_batched_tokens: int
    ) -> None:
        self._executor = executor
        self._slots = slots
        self._max_num_batched_tokens = max_num_batched_tokens
        self._pending: deque[_Pending] = deque()
        self._next_plan: int | None = None
        self._refuses = False  # a plan failed: later ones are refused
        self._result_failed = False  # later plans depend on the failed one
        self.num_steps = 0

    @property
    def slots(self) -> SlotTable:
        """The open slots."""
        return self._slots

    @property
    def num_pending(self) -> int:
        """Number of plans submitted and not finished."""
        return len(self._pending)

    @property
    def accepts(self) -> bool:
        """True if a plan may be submitted: the sampling of the last one isn't deferred.

        If it is still deferred when that plan is the oldest, it failed; :meth:`finish` raises.
        """
        return not (self._pending and self._pending[-1].submission.deferred)

    @property
    def next_result(self) -> int:
        """Number of the plan that :meth:`finish` finishes next."""
        return self._pending[0].number

    @property
    def completions(self) -> int | None:
        """See :attr:`gpu.executor.Executor.completions`."""
        return self._executor.completions

    def reset(self, next_plan: int) -> None:
        """Forget every slot, plan and failure; the next plan is number ``next_plan``."""
        while self._pending:
            submission = self._pending.popleft().submission
            if not submission.deferred:
                with contextlib.suppress(PlanError):  # of a plan that is forgotten
                    submission.wait()
        for slot in self._slots:
            try:
                self._executor.close(slot.number)
            except PlanError as error:  # from a logits processor; the slot is closed anyway
                _log.error("slot %d: %s", slot.number, error)
        self._slots.clear()
        self._next_plan = next_plan
        self._refuses = self._result_failed = False

    def statistics(self) -> dict[str, int]:
        """Return the counts of open slots, used pages and steps, and the process's memory."""
        resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {
            "open_slots": len(self.slots),
            "pages_used": self.slots.num_pages_used(),
            "steps": self.num_steps,
            "resident_bytes": resident_pages * os.sysconf("SC_PAGE_SIZE"),
        }

    def drop(self, slot: int, generation: int, plan: int) -> None:
        """Stop a sequence: rows of it after ``plan`` compute nothing and give no token."""
        self._slots.drop(slot, generation, plan)

    def step(self, plan: Plan) -> StepResult:
        """Run one plan from submission to result. No other plan may be pending.

        Raises:
            PlanError: as in :meth:`submit` and :meth:`finish`.
        """
        assert not self._pending
        self.submit(plan)
        return self.finish()

    def submit(self, plan: Plan) -> None:
        """Check a plan and hand it to the executor. Call it only while :attr:`accepts` is true.

        After an exception every plan is refused until :meth:`reset`.

        Raises:
            PlanError: the plan can't be run.
        """
        if self._refuses:
            raise PlanError("an earlier plan failed and no Reset has come since")
        assert self.accepts
        self._refuses = True
        if self._next_plan is not None and plan.number != self._next_plan:
            raise PlanError(f"plan {plan.number} came where {self._next_plan} was due")
        rows = self._slots.apply(plan)
        if plan.closed:
            for number in ints(plan.closed).tolist():
                self._executor.close(number)
        for opened in plan.opened:
            self._executor.open(self._slots[opened.slot])
        active = [row for row in rows if row.count]
        total = sum([row.count + row.drafts for row in active])
        if total > self._max_num_batched_tokens:
            raise PlanError(f"{total} tokens in one plan, over {self._max_num_batched_tokens}")
        submission = self._executor.submit(active, self._slots.copies(plan))
        for row in active:
            row.slot.advance(row.end)
        pending = _Pending(plan.number, rows, submission)
        if not submission.deferred:
            pending.append_unknown()
        self._pending.append(pending)
        self._next_plan = plan.number + 1
        self._refuses = False

    def finish(self) -> StepResult:
        """Block until the oldest pending plan is finished; return its result.

        After an exception every plan is refused until :meth:`reset`.

        Raises:
            PlanError: an earlier plan failed.
        """
        pending = self._pending.popleft()
        refused, self._refuses = self._refuses, True
        failed_before, self._result_failed = self._result_failed, True
        if pending.error is not None:
            raise pending.error
        drawn = None if pending.submission.deferred else pending.submission.wait()
        if failed_before or drawn is None:
            raise PlanError("the plan before this one failed")
        taken = _take_one_each(pending, drawn) if drawn.counts is None else _take(pending, drawn)
        self.num_steps += 1
        self._refuses, self._result_failed = refused, False
        self._draw_deferred()
        return _result(pending, taken, drawn)

    def _draw_deferred(self) -> None:
        """Begin deferred sampling once every earlier plan is finished."""
        if self.accepts or len(self._pending) > 1:
            return
        pending = self._pending[-1]
        try:
            pending.submission.sample()
        except Exception as error:  # raised later, when that plan is finished
            pending.error = error
        else:
            pending.append_unknown()


def _take_one_each(pending: _Pending, drawn: Drawn) -> list[bool]:
    """Give each slot its sampled token; return for each row whether it gave one."""
    tokens = dict(zip(pending.positions, drawn.tokens.tolist(), strict=True))
    # A token sampled after the sequence stopped is dropped.
    giving = [row.slot.number in tokens and not row.slot.stopped for row in pending.rows]
    for row, gives in zip(pending.rows, giving, strict=True):
        if gives:
            number = row.slot.number
            row.slot.settle(pending.positions[number], tokens[number])
    return giving


def _take(pending: _Pending, drawn: Drawn) -> list[int]:
    """Give each slot its sampled tokens; return how many each row gave."""
    tokens, starts = drawn.tokens.tolist(), _starts(pending, drawn)
    taken: list[int] = []
    for row in pending.rows:
        number = row.slot.number
        if number not in starts or row.slot.stopped:
            taken.append(0)
            continue
        start, stop = starts[number]
        taken.append(row.slot.take(pending.positions[number], tokens[start:stop]))
    return taken


def _starts(pending: _Pending, drawn: Drawn) -> dict[int, tuple[int, int]]:
    """Return, by slot number, the range of its tokens in ``drawn.tokens``."""
    counts = [1] * len(pending.positions) if drawn.counts is None else drawn.counts.tolist()
    ends = itertools.accumulate(counts, initial=0)
    return dict(zip(pending.positions, itertools.pairwise(ends), strict=True))


def _drafted(pending: _Pending, drawn: Drawn) -> bytes:
    """Return the column of verified drafts, in the order of the plan's rows."""
    if drawn.drafted is None:
        return b""
    verified = dict(zip(pending.positions, drawn.drafted.tolist(), strict=True))
    return from_ints([verified.get(row.slot.number, 0) for row in pending.rows])


def _result(pending: _Pending, taken: Sequence[int], drawn: Drawn) -> StepResult:
    """Return the result of a plan, with columns in the order of the plan's rows."""
    rows = pending.rows
    if drawn.counts is None and all(taken) and len(drawn.tokens) == len(rows):
        order = list(range(len(rows)))  # already in the order of the rows
        tokens, offsets = drawn.tokens, [*order, len(rows)]
    else:
        starts = _starts(pending, drawn)
        given = [(starts[row.slot.number][0], n) for row, n in zip(rows, taken, strict=True) if n]
        order = [start + place for start, count in given for place in range(count)]
        tokens, offsets = drawn.tokens[order], [0, *itertools.accumulate(taken)]
    result = StepResult(
        number=pending.number,
        slots=from_ints([row.slot.number for row in rows]),
        generations=from_ints([row.slot.generation for row in rows]),
        offsets=from_ints(offsets),
        tokens=from_ints(tokens),
        logprobs=(
            _NAN * len(order) if drawn.logprobs is None else from_floats(drawn.logprobs[order])
        ),
        prompts=drawn.prompts,
        pooled=drawn.pooled,
        tensors=drawn.tensors,
        drafted=_drafted(pending, drawn),
        step_us=drawn.times.step_us,
        gap_us=drawn.times.gap_us,
        idle_us=drawn.times.idle_us,
        launch_us=drawn.times.launch_us,
    )
    if drawn.top is not None and order:
        entries = [drawn.top[index] for index in order]
        result = attrs.evolve(
            result,
            top_offsets=from_ints(np.cumsum([0, *(len(ids) for ids, _ in entries)])),
            top_ids=from_ints(np.concatenate([ids for ids, _ in entries])),
            top_logprobs=from_floats(np.concatenate([values for _, values in entries])),
        )
    if drawn.named is not None and order:
        named = [drawn.named[index] for index in order]
        result = attrs.evolve(
            result,
            ids_offsets=from_ints(np.cumsum([0, *map(len, named)])),
            ids_logprobs=from_floats(np.concatenate(named)),
        )
    return result
