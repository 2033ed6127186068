"""What happened in a simulation, line by line, and what was found to be wrong."""

from __future__ import annotations

import hashlib

import attrs
import trio


class Violation(AssertionError):
    """Something happened that must not.

    Attributes:
        invariant: which of the invariants doesn't hold, in a few words.
    """

    def __init__(self, invariant: str, detail: str = "") -> None:
        super().__init__(f"{invariant}: {detail}" if detail else invariant)
        self.invariant = invariant


@attrs.define(eq=False)
class Trace:
    """Lines with their virtual times. Two runs of one scenario must give equal ones."""

    lines: list[str] = attrs.field(factory=list)

    def note(self, event: str) -> None:
        """Something happened now."""
        self.lines.append(f"{trio.current_time():.9f} {event}")

    def digest(self) -> str:
        """A hash of all of it."""
        return hashlib.blake2b("\n".join(self.lines).encode(), digest_size=8).hexdigest()
