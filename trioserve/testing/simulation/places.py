"""Checks over the messages of all workers: each request is computed in one place at a time.

A request that moves goes on behind the last token that came of it, wherever that was computed.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable

import attrs

from trioserve.protocol import wire
from trioserve.testing.simulation.trace import Violation
from trioserve.testing.simulation.turns import Row


@attrs.define(eq=False)
class PlaceChecker:
    """The clients that each worker computes for, and the tokens that came of each output."""

    is_paused: bool = False
    """True once the engine has reported that it is paused: nothing is in flight."""
    possible_culprits: set[int] = attrs.field(factory=set)
    """Clients that were alone in flight at a failure, or that a worker named."""
    _in_flight: dict[int, collections.Counter[int]] = attrs.field(init=False, factory=dict)
    """Plans in flight by client, for each worker."""
    _num_tokens: collections.Counter[Row] = attrs.field(init=False, factory=collections.Counter)

    def opened(self, slot: wire.OpenSlot, row: Row) -> None:
        """Check the tokens with which a worker begins to compute an output."""
        # A beam may go on with the tokens of another one.
        if not slot.sampler.processed_logprobs:
            known = len(wire.ints(slot.tokens)) - slot.prompt_length
            if known != self._num_tokens[row]:
                detail = f"output {row}: {known} tokens of {self._num_tokens[row]}"
                raise Violation("an output goes on behind its last token", detail)

    def planned(self, worker: int, rows: Iterable[Row]) -> None:
        """Check the rows of a plan of the worker of index ``worker``."""
        clients = {client for client, _ in rows}
        if clients and self.is_paused:
            raise Violation("nothing is computed in a pause", f"clients {sorted(clients)}")
        for other, in_flight in self._in_flight.items():
            twice = clients & (+in_flight).keys() if other != worker else set()
            if twice:
                detail = f"clients {sorted(twice)}, workers {other} and {worker}"
                raise Violation("a request is computed on one worker at a time", detail)
        self._in_flight.setdefault(worker, collections.Counter()).update(clients)

    def answered(self, worker: int, rows: Iterable[Row]) -> None:
        """Record that a plan with these rows is no longer in flight."""
        self._in_flight[worker].subtract({client for client, _ in rows})

    def forget(self, worker: int) -> None:
        """Record that nothing of a worker is in flight any more."""
        self._in_flight.pop(worker, None)

    def sampled(self, row: Row, num_tokens: int) -> None:
        """Record a result with ``num_tokens`` tokens of an output."""
        self._num_tokens[row] += num_tokens
