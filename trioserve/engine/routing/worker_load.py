"""The load of a worker at one moment, read from its scheduler."""

from __future__ import annotations

import numpy as np

from trioserve.engine.routing.policy import WorkerLoad
from trioserve.scheduler.core import SchedulerCore


def worker_load(core: SchedulerCore) -> WorkerLoad:
    """Return the load after the last plan."""
    num_waiting = core.num_waiting
    counts, slots = core.memory.counts, core.running.slots
    decodes, lengths = counts.decodes[slots], counts.length[slots]
    num_decodes = int(np.count_nonzero(decodes))
    prompt_tokens = core.num_waiting_tokens - core.num_waiting_cached
    if num_decodes < len(slots):
        left = lengths - counts.planned[slots]
        prompt_tokens += int(left[~decodes].sum())
        lengths = lengths[decodes]
    return WorkerLoad(
        model=core.step_times,
        prompt_tokens=prompt_tokens,
        num_prompts=num_waiting + len(slots) - num_decodes,
        num_decodes=num_decodes,
        context=int(np.add.reduce(lengths)),
        num_ahead=max(1 + num_waiting - core.memory.slots.num_free, 0),
        max_tokens=core.limits.max_num_batched_tokens,
    )
