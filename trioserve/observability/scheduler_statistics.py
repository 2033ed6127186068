"""The scheduler's counters, and the interface of their observer."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, Protocol

import attrs
import numpy as np
import numpy.typing as npt

from trioserve.protocol import wire
from trioserve.requests.request import Sequence


class Observer(Protocol):
    """Observer of the scheduler's events; no method blocks or fails. Times are in seconds."""

    def observe_step(self, num_tokens: int) -> None:
        """Record a step that prefilled and sampled ``num_tokens`` tokens together."""

    def observe_tokens(self, sequence: Sequence, num_tokens: int, now: float) -> None:
        """Record that ``sequence`` got ``num_tokens`` tokens at ``now``, before its times are
        updated.
        """

    def observe_gaps(self, gaps: npt.NDArray[np.float64]) -> None:
        """Record tokens, by the seconds since the last token of their sequence.

        The tokens that a sequence got in one step share the time since the step before evenly.

        A sequence's first token isn't among them, nor is the first after the loss of a worker.
        """


def sum_by_position(counts: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the sums of counts by position; a shorter one has zeros behind it."""
    return tuple(map(sum, itertools.zip_longest(*counts, fillvalue=0)))


@attrs.define(kw_only=True)
class Counters:
    """Totals since the start of the scheduler; they only grow."""

    num_steps: int = 0
    """Plans that have been acknowledged."""
    num_tokens_computed: int = 0
    """Tokens that those plans computed, recomputation included."""
    num_prefill_tokens: int = 0
    """The part of them that wasn't the newest token of an output."""
    num_tokens_sampled: int = 0
    """Tokens accepted into outputs."""
    num_drafts: int = 0
    """Rows that verified draft tokens."""
    num_draft_tokens: int = 0
    """Draft tokens verified."""
    num_accepted_drafts: int = 0
    """Draft tokens accepted."""
    accepted_by_position: tuple[int, ...] = ()
    """Draft tokens accepted, by their position in a row."""
    num_corrupted: int = 0
    """Requests that ended because their logits held NaN."""
    num_preemptions: int = 0
    """Sequences that were preempted. A worker's death isn't counted."""
    prefix_cache_queries: int = 0
    """Tokens of sequences when they got a slot."""
    prefix_cache_hits: int = 0
    """The part of them that needed no computation, because their pages were cached."""
    pages_evicted: int = 0
    """Cached pages that were evicted. Those of a flushed cache aren't counted."""
    pages_offloaded: int = 0
    """Cached pages that were copied to the host's memory to make room on the device."""
    pages_onloaded: int = 0
    """Pages that were copied back from the host's memory."""
    pages_written: int = 0
    """Pages that were written to the disk."""
    pages_read: int = 0
    """Pages that were read from the disk."""
    pages_imported: int = 0
    """Pages that were taken over from other workers."""
    num_handed_over: int = 0
    """Requests that moved to another worker once their prompts were computed."""
    step_us: int = 0
    """Microseconds in which workers' devices computed steps."""
    idle_us: int = 0
    """Microseconds in which the devices were idle although there was work.

    This includes time between steps, and time within steps for copies or masks.
    """
    launch_us: int = 0
    """Microseconds that workers took to queue steps on their devices."""

    def count_step(
        self, result: wire.StepResult, num_tokens: int, num_decodes: int, *, had_work: bool
    ) -> None:
        """Count a plan of ``num_tokens`` tokens that ``result`` acknowledges.

        ``num_decodes`` of them were the newest of an output. ``had_work`` tells whether there was
        work when the step before ended; without work, the time between the steps doesn't count as
        idle.
        """
        self.num_steps += 1
        self.num_tokens_computed += num_tokens
        self.num_prefill_tokens += num_tokens - num_decodes
        self.step_us += result.step_us
        self.launch_us += result.launch_us
        self.idle_us += result.gap_us
        if had_work:
            self.idle_us += result.idle_us


@attrs.frozen(kw_only=True)
class SchedulerStatistics(Counters):
    """The state of the scheduler, and a copy of its counters."""

    num_waiting: int = 0
    num_running: int = 0
    plans_in_flight: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    pages_held: int = 0
    """Pages of running sequences, and of plans in flight."""
    pages_total: int = 0
    host_pages_cached: int = 0
    """Pages in the host's memory that hold offloaded content."""
    host_pages_total: int = 0
    disk_pages: int = 0
    """Pages that the worker knows to be on disk."""
    running_adapters: tuple[str, ...] = ()
    """Names of the adapters of running sequences."""
    waiting_adapters: tuple[str, ...] = ()
    """Names of the adapters of waiting sequences; some may run as well."""

    @property
    def totals(self) -> SchedulerStatistics:
        """The counters alone, of a scheduler whose worker is gone for good."""
        return SchedulerStatistics(
            **{field.name: getattr(self, field.name) for field in attrs.fields(Counters)}
        )


def sum_of(statistics: Iterable[SchedulerStatistics]) -> SchedulerStatistics:
    """Return the sums of the numbers of several schedulers, and the names of all adapters."""
    rows = list(statistics)
    names = {field.name for field in attrs.fields(SchedulerStatistics)} - {"accepted_by_position"}
    return SchedulerStatistics(
        accepted_by_position=sum_by_position(row.accepted_by_position for row in rows),
        **{name: _sum([getattr(row, name) for row in rows]) for name in names},
    )


def _sum(values: list[Any]) -> Any:
    """Return the sum of numbers, or the union of tuples of names in order."""
    if isinstance(values[0], tuple):
        return tuple(sorted({name for names in values for name in names}))
    return sum(values)
