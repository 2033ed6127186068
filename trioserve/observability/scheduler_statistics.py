"""What the scheduler counts, and whom it tells."""

from __future__ import annotations

from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt

from trioserve.protocol import wire
from trioserve.requests.request import Sequence


class Observer(Protocol):
    """Is told what happens as it happens; neither blocks nor fails. Times are in seconds."""

    def observe_step(self, num_tokens: int) -> None:
        """A step has prefilled and sampled ``num_tokens`` tokens together."""

    def observe_tokens(self, sequence: Sequence, num_tokens: int, now: float) -> None:
        """``sequence`` got ``num_tokens`` tokens at ``now``; its times are as they were before."""

    def observe_gaps(self, gaps: npt.NDArray[np.float64]) -> None:
        """So many tokens came, each so many seconds after the last one of its sequence.

        The tokens that a sequence got in one step share the time since the step before evenly.

        None of them is the first of its sequence, or the first since a worker was lost.
        """


@attrs.define(kw_only=True)
class Counters:
    """Totals since the scheduler was made; they only grow."""

    num_steps: int = 0
    """Plans that have been acknowledged."""
    num_tokens_computed: int = 0
    """Tokens that those plans computed, recomputation included."""
    num_prefill_tokens: int = 0
    """Those of them that weren't just the newest token of an output."""
    num_tokens_sampled: int = 0
    """Tokens accepted into outputs."""
    num_corrupted: int = 0
    """Requests that were ended because their logits held NaN."""
    num_preemptions: int = 0
    """Sequences that had to give up their pages. A worker's death isn't counted."""
    prefix_cache_queries: int = 0
    """Tokens that sequences held when they got a slot."""
    prefix_cache_hits: int = 0
    """Those of them that needed no computation, because their pages were cached."""
    pages_evicted: int = 0
    """Cached pages whose content was lost to others. Those of an emptied cache aren't counted."""
    pages_offloaded: int = 0
    """Cached pages that were copied to the host, for their room on the device was needed."""
    pages_onloaded: int = 0
    """Pages that were copied back from there."""
    step_us: int = 0
    """Microseconds in which workers' devices computed steps."""
    idle_us: int = 0
    """Microseconds in which they computed nothing though there was something to compute.

    Between steps, and within them while data was copied or a mask was made.
    """
    launch_us: int = 0
    """Microseconds that workers took to queue steps on their devices."""

    def count_step(
        self, result: wire.StepResult, num_tokens: int, num_decodes: int, *, had_work: bool
    ) -> None:
        """A plan that computed ``num_tokens`` tokens has been acknowledged by ``result``.

        ``num_decodes`` of them were the newest of an output.
        ``had_work`` says whether somebody wanted to be computed when the step before it had ended:
        only then has the worker lost the time in between.
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
    """Where the scheduler stands now, and its counters as they are now."""

    num_waiting: int = 0
    num_running: int = 0
    plans_in_flight: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    pages_held: int = 0
    """Pages of running sequences, and those that a plan in flight still names."""
    pages_total: int = 0
    host_pages_cached: int = 0
    """Places in the host's memory that hold what was offloaded."""
    host_pages_total: int = 0
    running_adapters: tuple[str, ...] = ()
    """Names of the adapters of running sequences."""
    waiting_adapters: tuple[str, ...] = ()
    """Those of waiting ones, of which some may run, too."""
