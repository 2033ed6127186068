"""How long a worker may think about a plan before it counts as hung. Pure: ``now`` is an argument.

Only the oldest plan in flight is watched, from the moment in which nothing stands before it any
more. It may take the timeout, and beside that what a step of its size takes as far as is known: the
slowest step so far, and for a plan larger than any that has come back, so many times more. A step's
size is its tokens, each of which counts for more the more tokens its attention looks back at.
"""

from __future__ import annotations

import math

import attrs

from trioserve.scheduler.draft import InFlight

__all__ = ["Watchdog"]

FIRST_SECONDS = 0.1
"""For each token of a plan before any has come back: a large model on a slow processor."""
MAX_FIRST_SECONDS = 300.0
"""The same for the whole plan: a worker has shown by loading its model that it can compute."""
MAX_LATENESS = 1.0
"""Seconds by which a busy event loop may miss a deadline; by more, and the process was stopped."""


@attrs.define(eq=False)
class Watchdog:
    """The deadline of the plan that is due next.

    Args:
        timeout: seconds that any plan may take; 0 for as long as it likes.
    """

    timeout: float
    _plan: InFlight | None = attrs.field(init=False, default=None)
    _began: float = attrs.field(init=False, default=0.0)
    _allowed: float = attrs.field(init=False, default=math.inf)
    _slowest: float = attrs.field(init=False, default=0.0)
    """Seconds of the slowest step that has come back."""
    _largest: float = attrs.field(init=False, default=0.0)
    """Size of the largest."""
    _num_holds: int = attrs.field(init=False, default=0)
    _forgiven: InFlight | None = attrs.field(init=False, default=None)
    """The last plan that was given its time again."""

    def follow(self, oldest: InFlight | None, now: float) -> None:
        """``oldest`` is the plan that is due next, None if none is."""
        if oldest is not self._plan:
            self._plan, self._began = oldest, now
            self._allowed = math.inf if oldest is None else self.allowance(oldest)

    def learn(self, now: float) -> None:
        """The plan that was due has come back with a result."""
        if self._plan is not None and not self._num_holds:
            self._slowest = max(self._slowest, now - self._began)
            self._largest = max(self._largest, self._plan.size)

    def allowance(self, plan: InFlight) -> float:
        """Seconds that ``plan`` may take once nothing stands before it."""
        if not self.timeout:
            return math.inf
        if not self._largest:
            return self.timeout + min(plan.size * FIRST_SECONDS, MAX_FIRST_SECONDS)
        return self.timeout + self._slowest * max(plan.size / self._largest, 1.0)

    def hold(self) -> None:
        """Something else that the worker was asked for may keep it from its plan: don't count."""
        self._num_holds += 1

    def release(self, now: float) -> None:
        """That is done. The plan has all its time from now on."""
        self._num_holds -= 1
        self._began = now

    def forgive(self, now: float) -> bool:
        """The deadline has passed, and this is the first look since.

        If it comes so late that this process has been stopped itself, the worker may have been,
        too: a container that is paused takes both along. The plan then has all its time again, for
        once.

        Returns:
            whether it has.
        """
        if now - self.deadline <= MAX_LATENESS or self._forgiven is self._plan:
            return False
        self._forgiven = self._plan
        self._began = now
        return True

    @property
    def deadline(self) -> float:
        """When the worker counts as hung; infinity while nothing is due."""
        return math.inf if self._num_holds else self._began + self._allowed

    def is_late(self, now: float) -> bool:
        """Whether more than half of the time for the plan that is due has passed."""
        return not self._num_holds and now - self._began > self._allowed / 2

    def accusation(self) -> str:
        """What the worker has failed to do by the deadline."""
        assert self._plan is not None
        return (
            f"no step within {self._allowed:.3g} s (--watchdog-timeout): "
            f"plan {self._plan.number} of {len(self._plan.slots)} rows and "
            f"{self._plan.num_tokens} tokens"
        )
