"""Whether everybody gets in when it is his turn, as far as the plans show it.

Of those who lost their slot to others and have tokens to come, none may be overtaken by somebody
new. That is demanded where nothing else may change the order: arrival counts (``fcfs``), prefixes
aren't shared, and the worker has had no accident, after which suspects are tried in small numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from trioserve.testing.simulation.trace import Violation

Row = tuple[int, int]
"""A client's number and the index of one of its outputs."""


@attrs.define(eq=False)
class TurnRecord:
    """Who has been in, and how many tokens each has got."""

    is_due: Callable[[Row, int], bool]
    """Whether an output that has so many tokens has more to come, is still wanted, and waits for
    nothing but a slot."""
    enabled: bool
    _num_tokens: dict[Row, int] = attrs.field(factory=dict)
    _out: dict[Row, None] = attrs.field(factory=dict)
    """Those that have been in and are not any more."""

    def opened(self, rows: list[Row]) -> None:
        """One plan lets these in."""
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
                    "who was preempted comes in before who is new", f"{row} after {strangers}"
                )

    def closed(self, row: Row) -> None:
        """A plan puts this one out."""
        self._out[row] = None

    def sampled(self, row: Row, num_tokens: int) -> None:
        """A result has so many tokens for it."""
        self._num_tokens[row] = self._num_tokens.get(row, 0) + num_tokens

    def accident(self) -> None:
        """A worker was lost, or a plan failed: from now on others rules count as well."""
        self.enabled = False
