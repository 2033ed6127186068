"""Budget of answer bytes that clients leave unread, shared by all connections.

Whole answers count, and so do the pieces of streams that the protocol holds. Past the budget, the
oldest unread answer of the address that holds the most is cut off.
"""

from __future__ import annotations

from typing import Protocol

from trioserve.http.server.holdings import Holdings
from trioserve.observability.logs import get_logger

_log = get_logger("trioserve.http")


class Unsent(Protocol):
    """A holder of unsent bytes: a connection, or one stream of an HTTP/2 connection."""

    @property
    def address(self) -> str:
        """Return the client's address, under which its holdings are counted."""

    def cut_off(self) -> None:
        """Drop the bytes and end the answer, without waiting."""


class UnsentBudget:
    """Counter of unsent bytes, with a ``limit``; a single answer may exceed it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._holdings: Holdings[Unsent] = Holdings()

    @property
    def total(self) -> int:
        """Return the number of unsent bytes."""
        return self._holdings.total

    def add(self, holder: Unsent, size: int) -> None:
        """Count ``size`` more bytes of ``holder``; this may cut off an answer, also this one."""
        self._holdings.add(holder.address, holder, size)
        while self._holdings.total > self._limit and len(self._holdings) > 1:
            oldest = self._holdings.first_to_go()
            assert oldest is not None
            _log.info(
                "an unread answer was cut off",
                reason="unread answers hold more than --max-total-stream-bytes",
                client=oldest.address,
            )
            self._holdings.remove(oldest)
            oldest.cut_off()

    def remove(self, holder: Unsent, size: int | None = None) -> None:
        """Subtract ``size`` bytes of ``holder``, or all of them; fewer may be counted."""
        self._holdings.remove(holder, size)
