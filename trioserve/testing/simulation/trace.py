"""The trace of a simulation, line by line, and its violations."""

from __future__ import annotations

import hashlib

import attrs
import trio


class Violation(AssertionError):
    """An event that violates an invariant.

    Attributes:
        invariant: the violated invariant, in a few words.
    """

    def __init__(self, invariant: str, detail: str = "") -> None:
        super().__init__(f"{invariant}: {detail}" if detail else invariant)
        self.invariant = invariant


@attrs.define(eq=False)
class Trace:
    """Lines with their virtual times. Two runs of one scenario must have equal traces."""

    lines: list[str] = attrs.field(factory=list)

    def note(self, event: str) -> None:
        """Record an event at this moment."""
        self.lines.append(f"{trio.current_time():.9f} {event}")

    def digest(self) -> str:
        """Return a hash of the trace."""
        return hashlib.blake2b("\n".join(self.lines).encode(), digest_size=8).hexdigest()
