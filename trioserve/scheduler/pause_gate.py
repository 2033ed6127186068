"""The pause gate, which keeps all sequences, or all newcomers, from being computed.

Each caller pauses under its own key, so one resume doesn't end another caller's pause.
"""

from __future__ import annotations

import attrs


@attrs.define(eq=False)
class PauseGate:
    """The pauses in force. Pure bookkeeping; arrivals are numbers that grow."""

    _closed_by: set[str] = attrs.field(init=False, factory=set)
    _last_arrivals: dict[str, int] = attrs.field(init=False, factory=dict)
    """Last arrival that is still admitted, by key of the pause."""

    @property
    def is_closed(self) -> bool:
        """True if nothing may be computed."""
        return bool(self._closed_by)

    @property
    def is_open(self) -> bool:
        """True if every sequence may be admitted and computed."""
        return not self._closed_by and not self._last_arrivals

    def close(self, holder: str) -> None:
        """Stop all computation until :meth:`release` with the same key. Idempotent."""
        self._closed_by.add(holder)
        self._last_arrivals.pop(holder, None)

    def close_behind(self, holder: str, arrival: int) -> None:
        """Stop admitting requests that came after ``arrival``, until :meth:`release` with the same
        key.
        """
        self._last_arrivals[holder] = arrival
        self._closed_by.discard(holder)

    def join(self, other: PauseGate) -> None:
        """Take part in all pauses of ``other``, with no arrival so far."""
        self._closed_by |= other._closed_by
        self._last_arrivals |= dict.fromkeys(other._last_arrivals, 0)

    def release(self, holder: str) -> None:
        """End the pause of that key. Idempotent."""
        self._closed_by.discard(holder)
        self._last_arrivals.pop(holder, None)

    def admits(self, arrival: int) -> bool:
        """Return True if a sequence of that arrival may be admitted."""
        return not self._closed_by and all(arrival <= last for last in self._last_arrivals.values())
