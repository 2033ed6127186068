"""A record of each step, for readers of a feed; the counters are available to all."""

from __future__ import annotations

import attrs
import msgspec

from trioserve._util.feed import Feed
from trioserve.observability.scheduler_statistics import Counters, SchedulerStatistics
from trioserve.protocol import wire
from trioserve.scheduler.plan_builder import InFlight


class Iteration(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A step: its plan, and the scheduler's state when its result came.

    Numbers of events count from the previous record on, so that they add up to the counters of
    :meth:`trioserve.Engine.statistics`.
    """

    number: int
    """Steps since the engine began, this one included."""
    time: float
    """Time of the result, in seconds on trio's clock."""
    num_sequences: int
    """Sequences that the step computed."""
    num_prefills: int
    """Sequences among them that were in prefill."""
    num_prefill_tokens: int
    """Tokens that those computed, after a preemption also of their output."""
    num_decode_tokens: int
    """Tokens that the others computed, one each."""
    num_tokens_sampled: int
    """Tokens that were accepted into outputs."""
    num_finished: int
    """Sequences of the step that had finished when its result had been taken."""
    num_running: int
    """Sequences that hold a slot now."""
    num_waiting: int
    """Sequences that wait for a slot."""
    num_preempted: int
    """Sequences that were preempted for their pages."""
    plans_in_flight: int
    """Plans that have been sent and not been answered."""
    prefix_cache_queries: int
    """Tokens of the sequences that were admitted."""
    prefix_cache_hits: int
    """Tokens among them that were cached."""
    pages_evicted: int
    """Cached pages that were evicted and lost."""
    pages_offloaded: int
    """Cached pages that were copied to the host."""
    pages_onloaded: int
    """Pages that were copied back from the host."""
    pages_free: int
    pages_cached: int
    """Pages that no sequence holds and the prefix cache keeps."""
    pages_held: int
    pages_total: int
    host_pages_cached: int
    """Places in the host's memory that hold a page."""
    host_pages_total: int
    step_us: int
    """Microseconds for which the worker's device computed the step."""
    idle_us: int
    """Microseconds for which the device was idle with work to do, before and in the step."""
    launch_us: int
    """Microseconds that the worker took to queue the step on its device."""


@attrs.define(eq=False)
class Iterations:
    """The records of one scheduler, made while ``feed`` has readers."""

    _counters: Counters
    feed: Feed[Iteration] = attrs.field(init=False)
    _reported: Counters = attrs.field(init=False, factory=Counters)
    """Counters at the last record."""

    def __attrs_post_init__(self) -> None:
        self.feed = Feed(self._begin)

    def _begin(self) -> None:
        self._reported = attrs.evolve(self._counters)

    def note(
        self, after: SchedulerStatistics, plan: InFlight, result: wire.StepResult, now: float
    ) -> None:
        """Publish the record of ``plan``; ``after`` it, its ``result`` has been taken."""
        was, is_ = self._reported, attrs.evolve(self._counters)
        self._reported = is_
        self.feed.publish(
            Iteration(
                number=is_.num_steps,
                time=now,
                num_sequences=len(plan.seq_states),
                num_prefills=len(plan.seq_states) - plan.num_decodes,
                num_prefill_tokens=plan.num_tokens - plan.num_decodes,
                num_decode_tokens=plan.num_decodes,
                num_tokens_sampled=is_.num_tokens_sampled - was.num_tokens_sampled,
                num_finished=sum(each.sequence.seq_state is not each for each in plan.seq_states),
                num_running=after.num_running,
                num_waiting=after.num_waiting,
                num_preempted=is_.num_preemptions - was.num_preemptions,
                plans_in_flight=after.plans_in_flight,
                prefix_cache_queries=is_.prefix_cache_queries - was.prefix_cache_queries,
                prefix_cache_hits=is_.prefix_cache_hits - was.prefix_cache_hits,
                pages_evicted=is_.pages_evicted - was.pages_evicted,
                pages_offloaded=is_.pages_offloaded - was.pages_offloaded,
                pages_onloaded=is_.pages_onloaded - was.pages_onloaded,
                pages_free=after.pages_free,
                pages_cached=after.pages_cached,
                pages_held=after.pages_held,
                pages_total=after.pages_total,
                host_pages_cached=after.host_pages_cached,
                host_pages_total=after.host_pages_total,
                step_us=result.step_us,
                idle_us=is_.idle_us - was.idle_us,
                launch_us=result.launch_us,
            )
        )
