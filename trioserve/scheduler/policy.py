"""The choices: order of admission and of prompts, admission, and preemption.

They are pure functions; :mod:`trioserve.scheduler.core` acts on their results.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

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
    policy: str,
    waiting: Iterable[T],
    cached_tokens: Callable[[T], int],
    had_turn: Callable[[T], bool],
) -> Iterator[T]:
    """Yield waiting sequences in the order of admission.

    ``lpm`` takes the sequence with the most cached tokens first, so that a prefix is used while it
    is cached. Sequences with as many, and those past the first ``LPM_WINDOW``, keep their order.
    So do those that have run before, at the front: one that was preempted for another would come
    back before it.

    Args:
        policy: ``fcfs``, ``priority`` or ``lpm``.
        waiting: The waiting sequences, in the order of turns.
        cached_tokens: Returns the number of a waiting sequence's tokens that are cached.
        had_turn: Returns True if a waiting sequence has run before.
    """
    queue = iter(waiting)
    if policy == "lpm":
        window = list(itertools.islice(queue, LPM_WINDOW))
        window.sort(key=lambda each: (0, 0) if had_turn(each) else (1, -cached_tokens(each)))
        yield from window
    yield from queue


def split_running(remaining: Ints, may_run: Bools) -> tuple[Ints, Ints]:
    """Return the positions of the running sequences that decode, and of those in prefill.

    Args:
        remaining: For each running sequence, its tokens not yet given to a plan; 1 means decode.
        may_run: For each running sequence, True if it has a token left to sample that no plan
            in flight samples.
    """
    is_last = remaining == 1
    return (may_run & is_last).nonzero()[0], (may_run & ~is_last).nonzero()[0]


@attrs.frozen
class Candidate(Generic[T]):
    """A sequence with tokens of a prompt to compute, as :func:`prompt_order` compares it."""

    item: T
    priority: int
    """Smaller is first."""
    ratio: float
    """Its response ratio (:mod:`~trioserve.scheduler.prompt_share`); larger is first."""
    tenant: str | None = None
    """Sequences of one tenant and priority may change places; None keeps the place."""

    @property
    def rank(self) -> tuple[int, float]:
        return self.priority, -self.ratio


def prompt_order(running: Iterable[Candidate[T]], waiting: Iterable[Candidate[T]]) -> list[T]:
    """Return the order in which prompts are computed.

    Args:
        running: Sequences in prefill.
        waiting: Waiting sequences in the order of admission. The tenants' turns stay as they are:
            a sequence changes places with others of its tenant and priority only.
    """
    own: dict[tuple[int, str], list[Candidate[T]]] = {}
    turns = list(waiting)
    for each in turns:
        if each.tenant is not None:
            own.setdefault((each.priority, each.tenant), []).append(each)
    best = {key: iter(sorted(group, key=lambda c: c.rank)) for key, group in own.items()}
    queue = [
        each if each.tenant is None else next(best[each.priority, each.tenant]) for each in turns
    ]
    order: list[T] = []
    first = deque(sorted(running, key=lambda candidate: candidate.rank))
    for each in queue:
        while first and first[0].rank <= each.rank:
            order.append(first.popleft().item)
        order.append(each.item)
    return [*order, *(each.item for each in first)]


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
    sequence that may need more, so that the next page of one of them doesn't undo the admission.

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
    return need + int(np.count_nonzero(running_growth)) <= available


def choose_victim(running: Sequence[T]) -> T:
    """Return the running sequence to preempt: the last one, which loses the least waiting time."""
    return running[-1]
