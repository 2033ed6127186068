"""How long a worker may think about what it owes before it counts as hung. Pure: ``now`` is given.

What a worker does in its turn, plans and most calls, it does in the order in which it was asked, so
only the oldest of them is watched, from the moment in which nothing stands before it any more. What
its threads do is watched from the moment in which it was asked for.

A plan may take the timeout, and beside that what a step of its size takes as far as is known: the
slowest step so far, and for a plan larger than any that has come back, so many times more. A step's
size is its tokens, each of which counts for more the more tokens its attention looks back at. A
call may take the timeout, and what its size adds to that.
"""

from __future__ import annotations

import math

import attrs

from trioserve.scheduler.plan_builder import InFlight

FIRST_SECONDS = 0.1
"""For each token of a plan before any has come back: a large model on a slow processor."""
MAX_FIRST_SECONDS = 300.0
"""The same for the whole plan: a worker has shown by loading its model that it can compute."""
MAX_LATENESS = 1.0
"""Seconds by which a busy event loop may miss a deadline; by more, and the process was stopped."""

IN_THREADS = frozenset({"load_adapter", "prepare", "read_weights"})
"""Calls that threads of the worker answer, beside its steps."""
BYTES_PER_SECOND = {"read_weights": 10e6, "swap_weights": 100e6}
"""What a call gets through at least: of a slow disk, and of a slow memory."""
ADDED_SECONDS = {
    "discard_weights": 0.0,
    # Its files are a gigabyte at the very most.
    "load_adapter": 120.0,
    "ping": 0.0,
    "read_weights": 0.0,
    "statistics": 0.0,
    "swap_weights": 0.0,
    "unload_adapter": 0.0,
}
"""What calls may take beyond the timeout, whatever their size. How long others may take, nobody can
tell but who calls: ``prepare`` and ``encode`` are those."""


@attrs.frozen(eq=False, kw_only=True)
class OwedReply:
    """A call that the worker hasn't answered."""

    name: str
    allowed: float
    """Seconds; infinity if its caller keeps the time."""
    before_plan: int
    """The worker comes to it before it comes to that plan."""


@attrs.define(eq=False)
class Watchdog:
    """The deadline of what is due next.

    Args:
        timeout: seconds that anything may take; 0 for as long as it likes.
    """

    timeout: float
    _plan: InFlight | None = attrs.field(init=False, default=None)
    """The oldest in flight."""
    _replies: dict[OwedReply, None] = attrs.field(init=False, factory=dict)
    """Those that come in the worker's turn, in their order."""
    _beside: dict[OwedReply, float] = attrs.field(init=False, factory=dict)
    """Those of its threads, with their deadlines."""
    _due: InFlight | OwedReply | None = attrs.field(init=False, default=None)
    """What the worker is at, in its turn."""
    _began: float = attrs.field(init=False, default=0.0)
    _allowed: float = attrs.field(init=False, default=math.inf)
    _slowest: float = attrs.field(init=False, default=0.0)
    """Seconds of the slowest step that has come back."""
    _largest: float = attrs.field(init=False, default=0.0)
    """Size of the largest."""
    _forgiven: InFlight | OwedReply | None = attrs.field(init=False, default=None)
    """What was overdue when everything was given its time again, the last time."""

    def follow(self, oldest: InFlight | None, now: float) -> None:
        """``oldest`` is the plan that is due next, None if none is."""
        if oldest is not self._plan:
            self._plan = oldest
            self._look(now)

    def expect(self, name: str, num_bytes: int, before_plan: int, now: float) -> OwedReply:
        """The worker is asked for something by name, before it is sent plan ``before_plan``.

        Args:
            name: what the worker knows it by.
            num_bytes: how much it is about, where that counts.
            before_plan: the next plan's number.
            now: the time.
        """
        allowed = self._call_allowance(name, num_bytes)
        reply = OwedReply(name=name, allowed=allowed, before_plan=before_plan)
        if name in IN_THREADS:
            self._beside[reply] = now + allowed
        else:
            self._replies[reply] = None
            self._look(now)
        return reply

    def settle(self, reply: OwedReply, now: float) -> None:
        """It is there, or nobody waits for it any more. Idempotent."""
        self._beside.pop(reply, None)
        self._replies.pop(reply, None)
        self._look(now)

    def settle_all(self, now: float) -> None:
        """The worker that owed something is gone."""
        self._beside.clear()
        self._replies.clear()
        self._plan = None
        self._look(now)

    def _look(self, now: float) -> None:
        due = self._first_in_turn()
        if due is not self._due:
            self._due, self._began = due, now
            match due:
                case None:
                    self._allowed = math.inf
                case OwedReply():
                    self._allowed = due.allowed
                case _:
                    self._allowed = self.allowance(due)

    def _first_in_turn(self) -> InFlight | OwedReply | None:
        plan, reply = self._plan, next(iter(self._replies), None)
        if reply is not None and (plan is None or reply.before_plan <= plan.number):
            return reply
        return plan

    def learn(self, now: float) -> None:
        """The plan that was due has come back with a result."""
        if isinstance(self._due, InFlight):
            self._slowest = max(self._slowest, now - self._began)
            self._largest = max(self._largest, self._due.size)

    def allowance(self, plan: InFlight) -> float:
        """Seconds that ``plan`` may take once nothing stands before it."""
        if not self.timeout:
            return math.inf
        if not self._largest:
            return self.timeout + min(plan.size * FIRST_SECONDS, MAX_FIRST_SECONDS)
        return self.timeout + self._slowest * max(plan.size / self._largest, 1.0)

    def _call_allowance(self, name: str, num_bytes: int) -> float:
        if not self.timeout or name not in ADDED_SECONDS:
            return math.inf
        pace = BYTES_PER_SECOND.get(name, math.inf)
        return self.timeout + ADDED_SECONDS[name] + num_bytes / pace

    def forgive(self, now: float) -> bool:
        """The deadline has passed, and this is the first look since.

        If it comes so late that this process has been stopped itself, the worker may have been,
        too: a container that is paused takes both along. Everything then has all its time again,
        for once.

        Returns:
            whether it has.
        """
        overdue = self._overdue()
        if now - self.deadline <= MAX_LATENESS or self._forgiven is overdue:
            return False
        self._forgiven = overdue
        self._began = now
        self._beside = {reply: now + reply.allowed for reply in self._beside}
        return True

    @property
    def deadline(self) -> float:
        """When the worker counts as hung; infinity while nothing is due."""
        in_turn = self._began + self._allowed
        return min(in_turn, *self._beside.values()) if self._beside else in_turn

    def _overdue(self) -> InFlight | OwedReply | None:
        """What is due at the deadline."""
        deadline = self.deadline
        late = (reply for reply, until in self._beside.items() if until == deadline)
        return next(late, self._due)

    def is_late(self, now: float) -> bool:
        """Whether more than half of the time for something that is due has passed."""
        return now - self._began > self._allowed / 2 or any(
            now > until - reply.allowed / 2 for reply, until in self._beside.items()
        )

    def accusation(self) -> str:
        """What the worker has failed to do by the deadline."""
        overdue = self._overdue()
        assert overdue is not None
        if isinstance(overdue, OwedReply):
            return (
                f"no answer to {overdue.name!r} within {overdue.allowed:.3g} s (--watchdog-timeout)"
            )
        return (
            f"no step within {self._allowed:.3g} s (--watchdog-timeout): "
            f"plan {overdue.number} of {len(overdue.slots)} rows and "
            f"{overdue.num_tokens} tokens"
        )
