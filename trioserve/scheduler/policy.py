"""The choices: who comes first, who computes how many tokens, who may enter, who must leave.

Pure functions of what they are given; :mod:`trioserve.scheduler.core` acts on what they say.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import attrs
import numpy as np

from trioserve.scheduler.token_counts import Bools, Ints

Order = tuple[int, int, int, int]
"""A place in line: (priority, turn, arrival, index of the sequence in its request)."""

NO_TURN = 1 << 62
"""The turn of a sequence that hasn't had one: past every turn."""

LPM_WINDOW = 128
"""How many of the first in line the ``lpm`` policy looks at: each costs a walk of the tree."""


T = TypeVar("T")


def queue_order(policy: str, *, priority: int, arrival: int, index: int) -> Order:
    """Return the place of a sequence that hasn't had a turn (:mod:`~.waiting`)."""
    return (priority if policy == "priority" else 0, NO_TURN, arrival, index)


def admission_order(
    policy: str, waiting: Iterable[T], cached_pages: Callable[[T], int]
) -> Iterator[T]:
    """The waiting in the order in which they are to be admitted.

    ``lpm`` takes those first of which the most pages are cached, so that a prefix is used while it
    is there; among equals, and past the first ``LPM_WINDOW``, it is the order of ``waiting``.

    Args:
        policy: ``fcfs``, ``priority`` or ``lpm``.
        waiting: in the order of turns.
        cached_pages: how many pages of a waiting sequence the prefix cache holds.
    """
    line = iter(waiting)
    if policy == "lpm":
        window = list(itertools.islice(line, LPM_WINDOW))
        window.sort(key=cached_pages, reverse=True)
        yield from window
    yield from line


@attrs.frozen
class Share:
    """How a plan's tokens are shared out among the running; ``left`` of them are over."""

    decodes: Ints
    """The places in line of those who get one token each, their last."""
    chunks: list[tuple[int, int]]
    """The places of those in prefill, and how many tokens each of them gets."""
    left: int

    @classmethod
    def out(cls, remaining: Ints, may_run: Bools, budget: int, prompts: int) -> Share:
        """Share ``budget`` tokens out: one for every decode, then chunks of prompts, in order.

        There may be no more running than ``budget``, so a decode never waits for a prompt, and
        what is left is at least a token for everyone who is in prefill. Where somebody decodes,
        prompts have to do with ``prompts`` tokens, so that the next token isn't long in coming.

        Args:
            remaining: of everyone in line, the tokens that have not been given to a plan.
            may_run: whether there is a token left to sample that no plan in flight will.
            budget: tokens in the plan.
            prompts: most of them that prompts get beside decodes.
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
    """Whether a sequence may enter.

    ``guaranteed_no_evict`` never promises more than there is: then every running sequence gets its
    pages until its end. ``max_utilization`` keeps one page in hand for each of the running, so that
    the next page that one of them needs doesn't undo the admission; past that it takes the risk.

    Args:
        policy: the capacity policy, one of the two.
        available: pages that can be had at once, evicting what is idle.
        retiring: pages that come back with results in flight.
        need: pages that the sequence needs at once.
        growth: pages that it may need in addition before it ends by length.
        running_growth: the same of everyone in the running.
    """
    if need > available:
        return False
    if policy == "guaranteed_no_evict":
        return need + growth + int(np.sum(running_growth)) <= available + retiring
    return len(running_growth) == 0 or need + len(running_growth) <= available


def choose_victim(running: Sequence[T]) -> T:
    """Who of ``running``, in line, gives its pages up: the last, who has waited for the least."""
    return running[-1]
