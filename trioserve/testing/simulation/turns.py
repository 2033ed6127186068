"""Check of the order in which outputs get slots, by the plans.

A new output must not overtake one that was preempted and has tokens to come. The check applies only
if no other rule changes the order: requests run by arrival (``fcfs``), prefixes aren't shared, and
the worker had no fault, after which suspects run in small numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from trioserve.testing.simulation.trace import Violation

Row = tuple[int, int]
"""A client's number and the index of one of its outputs."""


@attrs.define(eq=False)
class TurnRecord:
    """The outputs that have had a slot, and the number of tokens of each."""

    is_due: Callable[[Row, int], bool]
    """Function that returns whether an output with so many tokens has more to come, is still
    wanted, and waits only for a slot.
    """
    enabled: bool
    _num_tokens: dict[Row, int] = attrs.field(factory=dict)
    _out: dict[Row, None] = attrs.field(factory=dict)
    """Outputs that had a slot and lost it."""

    def opened(self, rows: list[Row]) -> None:
        """Record that a plan opens slots for these outputs."""
        new = [row for row in rows if row not in self._num_tokens]
        for row in rows:
            self._out.pop(row, None)
            self._num_tokens.setdefault(row, 0)
        clients = {client for client, _ in self._num_tokens if (client, _) not in new}
        strangers = [row for row in new if row[0] not in clients]
        for row in self._out:
            is_due = self.is_due(row, self._num_tokens[row])
            if self.enabled and strangers and is_due:
                raise Violation(
                    "a preempted output comes before a new one", f"{row} after {strangers}"
                )

    def closed(self, row: Row) -> None:
        """Record that a plan closes an output's slot."""
        self._out[row] = None

    def sampled(self, row: Row, num_tokens: int) -> None:
        """Record a result of so many tokens for an output."""
        self._num_tokens[row] = self._num_tokens.get(row, 0) + num_tokens

    def accident(self) -> None:
        """Record the loss of a worker or a failed plan: other rules apply from now on."""
        self.enabled = False
