"""The choices: who comes first, who computes how many tokens, who may enter, who must leave.

Pure functions of what they are given; :mod:`trioserve.scheduler.core` acts on what they say.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import attrs

__all__ = ["Order", "Share", "admission_order", "choose_victim", "may_admit", "queue_order"]

Order = tuple[int, int, int]
"""A place in line: (priority, arrival, index of the sequence in its request)."""

LPM_WINDOW = 128
"""How many of the first in line the ``lpm`` policy looks at: each costs a walk of the tree."""


class Candidate(Protocol):
    """What a choice depends on; see :class:`~trioserve.scheduler.computation.Computation`."""

    @property
    def remaining(self) -> int: ...

    @property
    def may_run(self) -> bool: ...


C = TypeVar("C", bound=Candidate)
T = TypeVar("T")


def queue_order(policy: str, *, priority: int, arrival: int, index: int) -> Order:
    """The place in line. A preempted sequence keeps its own, so it comes back in front."""
    return (priority if policy == "priority" else 0, arrival, index)


def admission_order(
    policy: str, waiting: Iterable[T], cached_pages: Callable[[T], int]
) -> Iterator[T]:
    """The waiting in the order in which they are to be admitted.

    ``lpm`` takes those first of which the most pages are cached, so that a prefix is used while it
    is there; among equals, and past the first ``LPM_WINDOW``, it is the order of arrival.

    Args:
        policy: ``fcfs``, ``priority`` or ``lpm``.
        waiting: in line, by :func:`queue_order`.
        cached_pages: how many pages of a waiting sequence the prefix cache holds.
    """
    line = iter(waiting)
    if policy == "lpm":
        window = list(itertools.islice(line, LPM_WINDOW))
        window.sort(key=cached_pages, reverse=True)
        yield from window
    yield from line


@attrs.frozen
class Share(Generic[C]):
    """How a plan's tokens are shared out among the running; ``left`` of them are over."""

    decodes: list[C]
    """One token each."""
    chunks: list[tuple[C, int]]
    left: int

    @classmethod
    def out(cls, running: Iterable[C], budget: int) -> Share[C]:
        """Share ``budget`` tokens out: one for every decode, then chunks of prompts, in order.

        There may be no more running than ``budget``, so a decode never waits for a prompt, and
        what is left is at least a token for everyone who is in prefill.
        """
        decodes: list[C] = []
        prefills: list[C] = []
        for candidate in running:
            if candidate.may_run:
                (decodes if candidate.remaining == 1 else prefills).append(candidate)
        left = budget - len(decodes)
        assert left >= len(prefills), "more running than tokens in a plan"
        chunks: list[tuple[C, int]] = []
        for candidate in prefills:
            count = min(candidate.remaining, left)
            if count == 0:
                break
            chunks.append((candidate, count))
            left -= count
        return cls(decodes, chunks, left)


def may_admit(
    policy: str,
    *,
    available: int,
    retiring: int,
    need: int,
    growth: int,
    running_growth: Sequence[int],
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
        return need + growth + sum(running_growth) <= available + retiring
    return not running_growth or need + len(running_growth) <= available


def choose_victim(running: Sequence[T]) -> T:
    """Who of ``running``, in line, gives its pages up: the last, who has waited for the least."""
    return running[-1]
