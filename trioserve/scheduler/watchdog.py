"""Deadlines after which a worker counts as hung. Pure bookkeeping: ``now`` is given.

A worker does plans and most calls in the order in which it was asked. So only the oldest of them is
watched, from the moment when it is first in order. Work of the worker's threads is watched from the
moment of the call.

A plan may take the timeout plus the expected time of a step of its size. That is the time of the
slowest step so far, scaled up if the plan is larger than any that has come back. A step's size is
its tokens, each of which counts for more the longer its context. A call may take the timeout plus a
time for its size.
"""

from __future__ import annotations

import math

import attrs

from trioserve.scheduler.plan_builder import InFlight

FIRST_SECONDS = 0.1
"""Seconds for each token of a plan before any has come back, for a large model on a slow processor.
"""
MAX_FIRST_SECONDS = 300.0
"""Most seconds added so for the whole plan: loading the model has shown that the worker can
compute.
"""
MAX_LATENESS = 1.0
"""Seconds by which a busy event loop may miss a deadline. More means that the process was stopped.
"""

IN_THREADS = frozenset(
    {"align_speech", "encode_media", "export_pages", "import_pages", "load_adapter", "prepare"}
    | {"read_pages", "read_weights", "write_pages"}
)
"""Calls that the worker's threads answer, beside its steps."""
BYTES_PER_SECOND = {"read_weights": 10e6, "swap_weights": 100e6}
"""Slowest pace expected of a call: of a slow disk, and of a slow memory."""
ADDED_SECONDS = {
    "discard_weights": 0.0,
    "export_pages": 60.0,
    "import_pages": 60.0,
    # The files of an adapter are a gigabyte at most.
    "load_adapter": 120.0,
    "delete_pages": 60.0,
    "list_pages": 60.0,
    "ping": 0.0,
    # A slow disk, or a network's.
    "read_pages": 120.0,
    "read_weights": 0.0,
    "statistics": 0.0,
    "swap_weights": 0.0,
    "unload_adapter": 0.0,
    "write_pages": 120.0,
}
"""Seconds that calls may take beyond the timeout, whatever their size. For other calls, such as
``prepare`` and ``encode``, only the caller knows.
"""


@attrs.frozen(eq=False, kw_only=True)
class PendingReply:
    """A call that the worker hasn't answered."""

    name: str
    allowed: float
    """Seconds that it may take; infinity if its caller keeps the time."""
    before_plan: int
    """Number of the plan that comes after the call, in the worker's order."""


@attrs.define(eq=False)
class Watchdog:
    """The deadline of the work that is due next.

    Args:
        timeout: Seconds that anything may take; 0 for no limit.
    """

    timeout: float
    _plan: InFlight | None = attrs.field(init=False, default=None)
    """Oldest plan in flight."""
    _replies: dict[PendingReply, None] = attrs.field(init=False, factory=dict)
    """Calls that the worker answers in the order of its plans."""
    _beside: dict[PendingReply, float] = attrs.field(init=False, factory=dict)
    """Calls that threads answer, with their deadlines."""
    _due: InFlight | PendingReply | None = attrs.field(init=False, default=None)
    """Work that is first in the worker's order."""
    _began: float = attrs.field(init=False, default=0.0)
    _allowed: float = attrs.field(init=False, default=math.inf)
    _slowest: float = attrs.field(init=False, default=0.0)
    """Seconds of the slowest step that has come back."""
    _largest: float = attrs.field(init=False, default=0.0)
    """Size of the largest step that has come back."""
    _extended_for: InFlight | PendingReply | None = attrs.field(init=False, default=None)
    """Work that was overdue when all deadlines were last extended."""

    def follow(self, oldest: InFlight | None, now: float) -> None:
        """Watch ``oldest``, the plan that is due next; None if there is none."""
        if oldest is not self._plan:
            self._plan = oldest
            self._update(now)

    def expect(self, name: str, num_bytes: int, before_plan: int, now: float) -> PendingReply:
        """Watch a call that is sent before plan ``before_plan``.

        Args:
            name: Name of the call.
            num_bytes: Amount of data, if the call's time depends on it.
            before_plan: Number of the next plan.
            now: The time.
        """
        allowed = self._call_allowance(name, num_bytes)
        reply = PendingReply(name=name, allowed=allowed, before_plan=before_plan)
        if name in IN_THREADS:
            self._beside[reply] = now + allowed
        else:
            self._replies[reply] = None
            self._update(now)
        return reply

    def settle(self, reply: PendingReply, now: float) -> None:
        """Stop watching a call that was answered or given up. Idempotent."""
        self._beside.pop(reply, None)
        self._replies.pop(reply, None)
        self._update(now)

    def settle_all(self, now: float) -> None:
        """Stop watching everything: the worker is gone."""
        self._beside.clear()
        self._replies.clear()
        self._plan = None
        self._update(now)

    def _update(self, now: float) -> None:
        due = self._first_in_turn()
        if due is not self._due:
            self._due, self._began = due, now
            match due:
                case None:
                    self._allowed = math.inf
                case PendingReply():
                    self._allowed = due.allowed
                case _:
                    self._allowed = self.allowance(due)

    def _first_in_turn(self) -> InFlight | PendingReply | None:
        plan, reply = self._plan, next(iter(self._replies), None)
        if reply is not None and (plan is None or reply.before_plan <= plan.number):
            return reply
        return plan

    def learn(self, now: float) -> None:
        """Learn the time of a step from the result that has come."""
        if isinstance(self._due, InFlight):
            self._slowest = max(self._slowest, now - self._began)
            self._largest = max(self._largest, self._due.size)

    def allowance(self, plan: InFlight) -> float:
        """Return the seconds that ``plan`` may take once it is first in order."""
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

    def extend_deadlines(self, now: float) -> bool:
        """Extend all deadlines once if this process itself seems to have been stopped.

        To be called when the deadline has passed. If the call comes very late, this process has
        been stopped, and the worker perhaps too: pausing a container stops both. Then all work gets
        its full time again, but only once.

        Returns:
            True if the deadlines were extended.
        """
        overdue = self._overdue()
        if now - self.deadline <= MAX_LATENESS or self._extended_for is overdue:
            return False
        self._extended_for = overdue
        self._began = now
        self._beside = {reply: now + reply.allowed for reply in self._beside}
        return True

    @property
    def deadline(self) -> float:
        """Time when the worker counts as hung; infinity while nothing is due."""
        in_turn = self._began + self._allowed
        return min(in_turn, *self._beside.values()) if self._beside else in_turn

    def _overdue(self) -> InFlight | PendingReply | None:
        """Return the work that is due at the deadline."""
        deadline = self.deadline
        late = (reply for reply, until in self._beside.items() if until == deadline)
        return next(late, self._due)

    def is_late(self, now: float) -> bool:
        """Return True if more than half of the time for some due work has passed."""
        return now - self._began > self._allowed / 2 or any(
            now > until - reply.allowed / 2 for reply, until in self._beside.items()
        )

    def reason(self) -> str:
        """Return the reason for which the worker counts as hung: the overdue work."""
        overdue = self._overdue()
        assert overdue is not None
        if isinstance(overdue, PendingReply):
            return (
                f"no answer to {overdue.name!r} within {overdue.allowed:.3g} s (--watchdog-timeout)"
            )
        return (
            f"no step within {self._allowed:.3g} s (--watchdog-timeout): "
            f"plan {overdue.number} of {len(overdue.slots)} rows and "
            f"{overdue.num_tokens} tokens"
        )
