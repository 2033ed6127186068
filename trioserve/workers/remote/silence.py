"""The deadline of a link on which nothing is heard. Pure bookkeeping: ``now`` is given."""

from __future__ import annotations

import attrs

FIRST_TIMEOUT = 10.0
"""Seconds of silence before both ends know the time that the engine's options set."""
BEATS = 5
"""Heartbeats sent within the time of silence after which a link counts as lost."""
MAX_LATENESS = 1.0
"""Seconds by which a busy event loop may miss a deadline. More means that this process was stopped.
"""


@attrs.define(eq=False)
class Silence:
    """The time since something was heard of the other end.

    Args:
        timeout: Seconds of silence after which the link counts as lost.
        heard_at: Time when something was last heard.
    """

    timeout: float
    heard_at: float
    _was_extended: bool = attrs.field(init=False, default=False)

    @property
    def deadline(self) -> float:
        """Time when the link counts as lost."""
        return self.heard_at + self.timeout

    @property
    def interval(self) -> float:
        """Seconds between two heartbeats."""
        return min(self.timeout, FIRST_TIMEOUT) / BEATS

    def hear(self, now: float) -> None:
        """Note that something was heard."""
        self.heard_at = now
        self._was_extended = False

    def is_over(self, now: float) -> bool:
        """Return True if the link counts as lost.

        If this is called very late, this process was stopped, and what the other end sent meanwhile
        isn't read yet. Then the deadline is extended, once.
        """
        if now < self.deadline:
            return False
        if now - self.deadline > MAX_LATENESS and not self._was_extended:
            self.heard_at = now
            self._was_extended = True
            return False
        return True
