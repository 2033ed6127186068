"""Check, by the plans, of the order in which outputs get slots.

A new output must not overtake a preempted one of an earlier client that has tokens to come. A
shorter prompt may have overtaken an earlier client before, which then comes back in front. The
check applies only if no other rule changes the order: requests run by arrival (``fcfs``), prefixes
aren't shared, and there was no fault, after which suspects run alone.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from trioserve.testing.simulation.trace import Violation

Row = tuple[int, int]
"""A client's number and the index of one of its outputs."""


@attrs.define(eq=False)
class OrderChecker:
    """The outputs that have had a slot, and the number of tokens of each."""

    is_due: Callable[[Row, int], bool]
    """Returns True if an output with that many tokens has more to come and needs only a slot."""
    enabled: bool
    _num_tokens: dict[Row, int] = attrs.field(factory=dict)
    _preempted: dict[Row, None] = attrs.field(factory=dict)
    """Outputs that had a slot and lost it."""

    def opened(self, rows: list[Row]) -> None:
        """Record that a plan opens slots for these outputs."""
        new = [row for row in rows if row not in self._num_tokens]
        for row in rows:
            self._preempted.pop(row, None)
            self._num_tokens.setdefault(row, 0)
        clients = {client for client, _ in self._num_tokens if (client, _) not in new}
        newcomers = [row for row in new if row[0] not in clients]
        for row in self._preempted:
            is_due = self.is_due(row, self._num_tokens[row])
            later = [newcomer for newcomer in newcomers if newcomer[0] > row[0]]
            if self.enabled and later and is_due:
                raise Violation("a preempted output comes before a new one", f"{row} after {later}")

    def closed(self, row: Row) -> None:
        """Record that a plan closes an output's slot."""
        self._preempted[row] = None

    def sampled(self, row: Row, num_tokens: int) -> None:
        """Record a result with ``num_tokens`` tokens of an output."""
        self._num_tokens[row] = self._num_tokens.get(row, 0) + num_tokens

    def on_fault(self) -> None:
        """Stop checking: after a lost worker or failed plan other rules apply."""
        self.enabled = False
