"""Room for drafted tokens, if rows of the worker may bring several tokens."""

from __future__ import annotations

import numpy as np

from trioserve.scheduler.memory import Memory
from trioserve.scheduler.plan_builder import PlanBuilder
from trioserve.scheduler.sequence_state import SequenceState


def plan_drafts(builder: PlanBuilder, memory: Memory, max_row_tokens: int) -> None:
    """Let rows that decode draft tokens, as far as budget and pages are left over.

    Preempt nothing for that. A row drafts no token that its sequence couldn't take.
    """
    seq_states, slots = builder.decodes
    counts = memory.counts
    # The length already includes the token that the row brings without any drafts.
    extra = np.minimum(max_row_tokens - 1, counts.limit[slots] - counts.length[slots])
    may_draft = counts.may_draft[slots] & ~counts.waits[slots]
    extra[np.isnan(counts.last_token[slots]) | ~may_draft] = 0
    before = np.cumsum(extra) - extra
    extra = np.clip(builder.budget - before, 0, extra)
    for place in (counts.planned[slots] + extra > counts.room[slots]).nonzero()[0].tolist():
        extra[place] = _grow(seq_states[place], int(extra[place]), builder, memory)
    if extra.any():
        counts.unsettled[slots[extra > 0]] = True
        builder.draft(extra)


def _grow(seq_state: SequenceState, extra: int, builder: PlanBuilder, memory: Memory) -> int:
    """Append pages for ``extra`` drafts; return for how many of them there is room."""
    counts, slot = memory.counts, seq_state.slot
    while counts.room[slot] < seq_state.planned + extra:
        page = memory.append_page(seq_state)
        if page is None:
            break
        builder.append_page(seq_state, page)
    return min(extra, int(counts.room[slot]) - seq_state.planned)
