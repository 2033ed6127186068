"""The choices: order of admission, shares of a plan, admission, and preemption.

They are pure functions; :mod:`trioserve.scheduler.core` acts on their results.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import attrs
import numpy as np

from trioserve.scheduler.token_counts import Bools, Ints

Order = tuple[int, int, int, int]
"""Position in a queue: (priority, turn, arrival, index of the sequence in its request)."""

NO_TURN = 1 << 62
"""Turn of a sequence that hasn't had one: greater than every turn."""

LPM_WINDOW = 128
"""Number of waiting sequences that the ``lpm`` policy looks at: each costs a walk of the tree."""


T = TypeVar("T")


def queue_order(policy: str, *, priority: int, arrival: int, index: int) -> Order:
    """Return the position of a sequence that hasn't had a turn (:mod:`~.waiting_queue`)."""
    return (priority if policy == "priority" else 0, NO_TURN, arrival, index)


def admission_order(
    policy: str, waiting: Iterable[T], cached_pages: Callable[[T], int]
) -> Iterator[T]:
    """Yield waiting sequences in the order of admission.

    ``lpm`` takes the sequence with the most cached pages first, so that a prefix is used while it
    is cached. Sequences with as many, and those past the first ``LPM_WINDOW``, keep their order.

    Args:
        policy: ``fcfs``, ``priority`` or ``lpm``.
        waiting: The waiting sequences, in the order of turns.
        cached_pages: Returns the number of cached pages of a waiting sequence.
    """
    queue = iter(waiting)
    if policy == "lpm":
        window = list(itertools.islice(queue, LPM_WINDOW))
        window.sort(key=cached_pages, reverse=True)
        yield from window
    yield from queue


@attrs.frozen
class Share:
    """The tokens of a plan that each running sequence gets; ``left`` tokens are not used."""

    decodes: Ints
    """Positions of the running sequences that get one token each, their last."""
    chunks: list[tuple[int, int]]
    """Positions of the sequences in prefill, and their numbers of tokens."""
    left: int

    @classmethod
    def divide(cls, remaining: Ints, may_run: Bools, budget: int, prompts: int) -> Share:
        """Divide ``budget`` tokens: one for every decode, then chunks of prompts, in order.

        There are never more running sequences than ``budget``. So a decode never waits for a
        prompt, and at least one token is left for each sequence in prefill. Beside decodes, prompts
        get at most ``prompts`` tokens, so that the next token isn't long in coming.

        Args:
            remaining: For each running sequence, its tokens not yet given to a plan.
            may_run: For each running sequence, True if it has a token left to sample that no plan
                in flight samples.
            budget: Tokens in the plan.
            prompts: Most tokens that prompts get beside decodes.
        """
        is_last = remaining == 1
        decodes = (may_run & is_last).nonzero()[0]
        prefills = (may_run & ~is_last).nonzero()[0]
        left = budget - len(decodes)
        if len(decodes):
            left = min(left, max(prompts, len(prefills)))
        assert left >= len(prefills), "more running than tokens in a plan"
        chunks: list[tuple[int, int]] = []
        for place in prefills.tolist():
            count = min(int(remaining[place]), left)
            if count == 0:
                break
            chunks.append((place, count))
            left -= count
        return cls(decodes, chunks, left)


def may_admit(
    policy: str,
    *,
    available: int,
    retiring: int,
    need: int,
    growth: int,
    running_growth: Ints,
) -> bool:
    """Return True if a sequence may be admitted.

    ``guaranteed_no_evict`` never promises more pages than there are, so every running sequence gets
    its pages until its end. ``max_utilization`` keeps one page in reserve for each running
    sequence, so that the next page that one of them needs doesn't undo the admission.

    Args:
        policy: Capacity policy, one of the two.
        available: Pages that can be had at once, evicting idle ones.
        retiring: Pages that come back with results in flight.
        need: Pages that the sequence needs at once.
        growth: Pages that it may still need before it ends by length.
        running_growth: Pages that each running sequence may still need.
    """
    if need > available:
        return False
    if policy == "guaranteed_no_evict":
        return need + growth + int(np.sum(running_growth)) <= available + retiring
    return len(running_growth) == 0 or need + len(running_growth) <= available


def choose_victim(running: Sequence[T]) -> T:
    """Return the running sequence to preempt: the last one, which loses the least waiting time."""
    return running[-1]
