"""The pause of drafts that take more time than they save."""

from __future__ import annotations

import attrs

WINDOW = 256
"""Rows of steps after which the time that drafts took is compared with what they saved."""
TOLERATED = 0.01
"""Share of the steps' time that drafts may cost. Where few are found, as in an open conversation,
looking for them is to go on.
"""
SHORTEST, LONGEST = 16, 128
"""Steps of the first pause, and of those after several windows in which drafts didn't pay."""


@attrs.define
class DraftPause:
    """The steps without drafts after others in which drafts didn't pay.

    How many drafts a step verifies follows from estimates (:mod:`gpu.sampling.drafting.choice`).
    Those with the highest estimates are chosen, so most of these are too high, and looking drafts
    up takes time, too. This counts what they bring.
    """

    _steps_left: int = attrs.field(init=False, default=0)
    """Steps left of this pause."""
    _next_length: int = attrs.field(init=False, default=SHORTEST)
    _num_sequences: int = attrs.field(init=False, default=0)
    """Open sequences at the last step outside a pause."""
    _num_opened: int = attrs.field(init=False, default=0)
    """Sequences that began in this pause."""
    _window_rows: int = attrs.field(init=False, default=0)
    """Rows of the steps of this window so far."""
    _saved: float = attrs.field(init=False, default=0.0)
    """Seconds that drafts saved in this window; negative if they cost more."""
    _seconds: float = attrs.field(init=False, default=0.0)
    """Seconds that the steps of this window would take without drafts."""

    def open(self) -> None:
        """Note that a sequence begins."""
        self._num_opened += 1

    def includes(self, num_sequences: int) -> bool:
        """Return whether the next step belongs to a pause; ``num_sequences`` are open. Count it.

        A pause ends once half of its sequences have ended, or as many have begun: what was learned
        holds for few of the others.
        """
        has_ended = 2 * num_sequences <= self._num_sequences
        if has_ended or 2 * self._num_opened >= num_sequences:
            self._steps_left = 0
        if not self._steps_left:
            self._num_sequences = num_sequences
            return False
        self._steps_left -= 1
        return True

    def note(self, num_rows: int, saved: float, seconds: float, *, has_drafts: bool) -> None:
        """Note a step outside a pause, and how many seconds drafts saved or, below 0, cost.

        Args:
            num_rows: Rows of the step.
            saved: Seconds saved.
            seconds: Time that the step would take without drafts.
            has_drafts: True if it verified drafts, rather than look for them in vain.
        """
        self._window_rows += num_rows
        self._saved += saved
        self._seconds += seconds
        if self._window_rows < WINDOW:
            return
        if self._saved < -TOLERATED * self._seconds:
            self._steps_left, self._num_opened = self._next_length, 0
            self._next_length = min(2 * self._next_length, LONGEST)
        else:
            self._next_length = SHORTEST
        self._window_rows, self._saved, self._seconds = 0, 0.0, 0.0
