"""A batch of sequences, driven through a runner as an engine would, with plans made ahead."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import torch

from bench.kernels.report import Row
from gpu.cuda.assembly import ServingLimits
from gpu.runner import Runner
from trioserve.protocol.sampling import SamplerParams
from trioserve.protocol.wire import OpenSlot, Plan, StepResult, from_ints


@attrs.frozen(kw_only=True)
class StepTimes:
    """Times of a run of decode steps, in seconds of one step on average.

    ``step`` is the time from one result to the next, as a client would see it. ``device`` and
    ``idle`` come from the device's own clock: what it computed, and what it waited in between.
    ``submit`` is what handing over a plan takes on the host.
    """

    step: float
    device: float
    idle: float
    submit: float

    @property
    def idle_share(self) -> float:
        """The share of its time that the device waited."""
        return self.idle / (self.idle + self.device) if self.idle else 0.0


class DecodeBatch:
    """Sequences of ``context`` random tokens, in slots from 0 on, on a new runner.

    ``limits`` leave pages for the contexts and all steps to come.
    """

    def __init__(
        self, runner: Runner, *, context: int, limits: ServingLimits, vocab_size: int
    ) -> None:
        self._runner = runner
        self._limits = limits
        self._free = list(range(limits.num_pages))
        self._number = 0
        self._context = context
        rows = limits.max_num_seqs
        self.computed = [0] * rows
        """The computed tokens of each sequence."""
        self._pages = [0] * rows
        rng = random.Random(0)
        # Letters that differ from the first token on: no two sequences share a page.
        self._opened = [
            OpenSlot(
                slot=slot,
                generation=1,
                tokens=from_ints([rng.randrange(vocab_size) for _ in range(context)]),
                prompt_length=context,
                computed=0,
                pages=b"",
                sampler=SamplerParams(temperature=0.8, seed=slot),
            )
            for slot in range(rows)
        ]

    def prefill(self) -> float:
        """Compute all contexts in steps as large as the limits allow; return the seconds."""
        began, max_tokens = time.perf_counter(), self._limits.max_num_batched_tokens
        while min(self.computed) < self._context:
            counts: dict[int, int] = {}
            for slot, computed in enumerate(self.computed):
                if count := min(self._context - computed, max_tokens - sum(counts.values())):
                    counts[slot] = count
            self._runner.step(self._plan(counts))
        return time.perf_counter() - began

    def decode(self, num_steps: int, *, in_flight: int, warm_up: int = 3) -> StepTimes:
        """Run steps of one token for each sequence, with up to ``in_flight`` plans submitted."""
        every_row = dict.fromkeys(range(len(self.computed)), 1)
        submits: list[float] = []
        results: list[StepResult] = []
        ends: list[float] = []

        def finish_until(most_pending: int) -> None:
            while self._runner.num_pending > most_pending:
                results.append(self._runner.finish())
                ends.append(time.perf_counter())

        for _ in range(warm_up + num_steps):
            finish_until(in_flight - 1)
            plan = self._plan(every_row)
            began = time.perf_counter()
            self._runner.submit(plan)
            submits.append(time.perf_counter() - began)
        finish_until(0)
        counted = results[warm_up:]
        return StepTimes(
            step=(ends[-1] - ends[warm_up - 1]) / num_steps,
            device=sum(result.step_us for result in counted) / num_steps / 1e6,
            idle=sum(result.idle_us + result.gap_us for result in counted) / num_steps / 1e6,
            submit=sum(submits[warm_up:]) / num_steps,
        )

    def _plan(self, counts: Mapping[int, int]) -> Plan:
        """Return a plan of so many tokens of each slot, with the pages that they need."""
        page_slots: list[int] = []
        for slot, count in counts.items():
            self.computed[slot] += count
            needed = -(-self.computed[slot] // self._limits.page_size) - self._pages[slot]
            self._pages[slot] += needed
            page_slots += [slot] * needed
        self._number += 1
        opened, self._opened = self._opened, []
        return Plan(
            number=self._number,
            opened=opened,
            page_slots=from_ints(page_slots),
            page_ids=from_ints([self._free.pop() for _ in page_slots]),
            row_slots=from_ints(list(counts)),
            row_counts=from_ints(list(counts.values())),
        )


def profile_steps(run: Callable[[], object], num_steps: int) -> dict[str, Row]:
    """Run ``run``, which computes ``num_steps`` steps without CUDA graphs, under the profiler.

    Kernels are seen one by one only where they are launched one by one. Profiling costs the host
    time, not the device: the gaps between kernels are not those of a step that is measured.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    return shares(profiler.key_averages(), num_steps)


def shares(events: Iterable[Any], num_steps: int) -> dict[str, Row]:
    """Return a row for each kernel of a step from the profiler's averages, the longest first."""
    ran = [each for each in events if each.self_device_time_total]
    total = sum(each.self_device_time_total for each in ran)
    return {
        each.key: {
            "kernel": each.key[:60],
            "launches": each.count / num_steps,
            "µs a step": each.self_device_time_total / num_steps,
            "share": f"{each.self_device_time_total / total:.1%}",
        }
        for each in sorted(ran, key=lambda event: -event.self_device_time_total)
    }
