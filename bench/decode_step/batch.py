"""A batch of sequences, driven through a runner as an engine would, with plans made ahead."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import attrs

from gpu.runner import Runner
from trioserve.protocol.sampling import SamplerParams
from trioserve.protocol.wire import OpenSlot, Plan, StepResult, from_ints

_SAMPLER = SamplerParams(temperature=0.8)


@attrs.frozen(kw_only=True)
class StepTimes:
    """Times of a run of decode steps, in seconds of one step on average.

    ``step`` is the time from one result to the next, as a client would see it. ``device`` and
    ``idle`` come from the device's own clock: what it computed, and what it waited in between.
    ``submit`` is what handing over a plan takes on the host.
    """

    num_steps: int
    step: float
    device: float
    idle: float
    submit: float

    @property
    def idle_share(self) -> float:
        """The share of its time that the device waited."""
        return self.idle / (self.idle + self.device) if self.idle else 0.0


class DecodeBatch:
    """Sequences of random tokens, one for each of ``contexts``, in slots from 0 on.

    ``plan_number`` is the last plan that ``runner`` was given. There must be pages for the
    contexts and all steps to come.
    """

    def __init__(
        self,
        runner: Runner,
        contexts: Sequence[int],
        *,
        page_size: int,
        num_pages: int,
        vocab_size: int,
        plan_number: int,
    ) -> None:
        self._runner = runner
        self._page_size = page_size
        self._free = list(range(num_pages))
        self.plan_number = plan_number
        self._computed = [0] * len(contexts)
        self._pages = [0] * len(contexts)
        self._contexts = list(contexts)
        chooser = random.Random(0)
        # Letters that differ from the first token on: no two sequences share a page.
        self._opened = [
            OpenSlot(
                slot=slot,
                generation=1,
                tokens=from_ints([chooser.randrange(vocab_size) for _ in range(context)]),
                prompt_length=context,
                computed=0,
                pages=b"",
                sampler=attrs.evolve(_SAMPLER, seed=slot),
            )
            for slot, context in enumerate(contexts)
        ]

    def prefill(self, max_tokens: int) -> float:
        """Compute all contexts in steps of up to ``max_tokens``; the seconds that took."""
        began = time.perf_counter()
        while counts := self._prefill_counts(max_tokens):
            self._runner.step(self._plan(counts))
        return time.perf_counter() - began

    def _prefill_counts(self, max_tokens: int) -> dict[int, int]:
        counts: dict[int, int] = {}
        lengths = zip(self._contexts, self._computed, strict=True)
        for slot, (context, computed) in enumerate(lengths):
            if count := min(context - computed, max_tokens - sum(counts.values())):
                counts[slot] = count
        return counts

    def decode(self, num_steps: int, *, in_flight: int, warm_up: int = 3) -> StepTimes:
        """Run steps of one token for each sequence, with up to ``in_flight`` plans submitted."""
        every_row = dict.fromkeys(range(len(self._contexts)), 1)
        submits: list[float] = []
        results: list[StepResult] = []
        ends: list[float] = []

        def finish() -> None:
            results.append(self._runner.finish())
            ends.append(time.perf_counter())

        for _ in range(warm_up + num_steps):
            while self._runner.num_pending >= in_flight:
                finish()
            plan = self._plan(every_row)
            began = time.perf_counter()
            self._runner.submit(plan)
            submits.append(time.perf_counter() - began)
        while self._runner.num_pending:
            finish()
        counted = results[warm_up:]
        return StepTimes(
            num_steps=num_steps,
            step=(ends[-1] - ends[warm_up - 1]) / num_steps,
            device=sum(result.step_us for result in counted) / num_steps / 1e6,
            idle=sum(result.idle_us + result.gap_us for result in counted) / num_steps / 1e6,
            submit=sum(submits[warm_up:]) / num_steps,
        )

    def close(self) -> None:
        """Close every slot; the batch is used up."""
        self.plan_number += 1
        slots = range(len(self._contexts))
        self._runner.step(Plan(number=self.plan_number, closed=from_ints(slots)))

    @property
    def lengths(self) -> list[int]:
        """The computed tokens of each sequence."""
        return list(self._computed)

    def _plan(self, counts: dict[int, int]) -> Plan:
        page_slots: list[int] = []
        page_ids: list[int] = []
        for slot, count in counts.items():
            self._computed[slot] += count
            while self._pages[slot] * self._page_size < self._computed[slot]:
                page_slots.append(slot)
                page_ids.append(self._free.pop())
                self._pages[slot] += 1
        self.plan_number += 1
        opened, self._opened = self._opened, []
        return Plan(
            number=self.plan_number,
            opened=opened,
            page_slots=from_ints(page_slots),
            page_ids=from_ints(page_ids),
            row_slots=from_ints(list(counts)),
            row_counts=from_ints(list(counts.values())),
        )
