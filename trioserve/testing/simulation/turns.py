"""Check, by the plans, of the order in which outputs get slots.

A new output must not overtake a preempted one that has tokens to come. It may have been passed by a
shorter prompt of its tenant, which was preempted since: then it comes in front of that one, and so
of all that had their first slot later. The check applies only if no other rule changes the order:
requests run by arrival (``fcfs``), prefixes aren't shared, no client searches with beams, and
there was no fault, after which suspects run alone.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from trioserve.testing.simulation.scenario import Scenario
from trioserve.testing.simulation.trace import Violation

Row = tuple[int, int]
"""A client's number and the index of one of its outputs."""


@attrs.define(eq=False)
class OrderChecker:
    """The outputs that have had a slot, and the number of tokens of each."""

    is_due: Callable[[Row, int], bool]
    """Returns True if an output with that many tokens has more to come and needs only a slot."""
    is_older: Callable[[int, int], bool]
    """Returns True if the first client's request is the older one of two of one tenant."""
    enabled: bool
    _num_tokens: dict[Row, int] = attrs.field(init=False, factory=dict)
    _preempted: dict[Row, None] = attrs.field(init=False, factory=dict)
    """Outputs that had a slot and lost it."""

    @classmethod
    def of(cls, scenario: Scenario, is_due: Callable[[Row, int], bool]) -> OrderChecker:
        """Return the checker of a scenario, enabled if no other rule changes the order."""
        clients = {client.number: client for client in scenario.clients}

        def is_older(client: int, other: int) -> bool:
            one, another = clients[client], clients[other]
            return one.tenant == another.tenant and one.arrives <= another.arrives

        by_arrival = scenario.options["scheduling_policy"] == "fcfs"
        shares = scenario.options["enable_prefix_caching"] or bool(scenario.adapters)
        searches = any(client.beam_width for client in scenario.clients)
        return cls(is_due, is_older, enabled=by_arrival and not shares and not searches)

    def opened(self, rows: list[Row]) -> None:
        """Record that a plan opens slots for these outputs."""
        new = [row for row in rows if row not in self._num_tokens]
        for row in rows:
            self._preempted.pop(row, None)
            self._num_tokens.setdefault(row, 0)
        clients = {client for client, _ in self._num_tokens if (client, _) not in new}
        newcomers = [row for row in new if row[0] not in clients]
        if not self.enabled or not newcomers:
            return
        before: list[Row] = []
        # In the order of their first slots.
        for row in [row for row in self._num_tokens if row in self._preempted]:
            before.append(row)
            others = [
                each
                for each in newcomers
                if not any(self.is_older(each[0], client) for client, _ in before)
            ]
            if others and self.is_due(row, self._num_tokens[row]):
                raise Violation(
                    "a preempted output comes before a new one", f"{row} after {others}"
                )

    def closed(self, row: Row) -> None:
        """Record that a plan closes an output's slot."""
        self._preempted[row] = None

    def sampled(self, row: Row, num_tokens: int) -> None:
        """Record a result with ``num_tokens`` tokens of an output."""
        self._num_tokens[row] = self._num_tokens.get(row, 0) + num_tokens

    def on_fault(self) -> None:
        """Stop checking: after a lost worker or failed plan other rules apply."""
        self.enabled = False
