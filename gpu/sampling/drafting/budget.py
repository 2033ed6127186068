"""The budget of a draft model, whose steps take time whether or not its drafts are accepted."""

from __future__ import annotations

import attrs

ALLOWED = 0.01
"""Share of the steps' time that drafts may cost in the long run."""
MOST_DEBT = 4.0
"""Debt in steps from which on there are no drafts until it is paid off. It is more than what the
draft model takes for the prompts of a few sequences, which has to come before any of their drafts.
"""


@attrs.define
class DraftBudget:
    """The debt of drafts that cost more than they save.

    A draft model computes the whole prompt of a sequence before it drafts for it, so a short trial
    costs nearly as much as a long one. What one sequence shows holds for most others: other than
    :class:`~gpu.sampling.drafting.pause.DraftPause`, this has a memory beyond them.
    """

    _debt: float = attrs.field(init=False, default=0.0)
    """Steps' time that drafts cost, less what they saved and were allowed."""
    _is_spent: bool = attrs.field(init=False, default=False)

    def open(self) -> None:
        """Do nothing: a sequence that begins doesn't pay for those before it."""

    def includes(self, num_rows: int) -> bool:
        """Return whether the next step, of ``num_rows`` rows, has no drafts; count it."""
        self._debt = max(self._debt - ALLOWED, 0.0)
        if not self._debt:
            self._is_spent = False
        return self._is_spent

    def note(self, num_rows: int, saved: float, seconds: float) -> None:
        """See :meth:`gpu.sampling.drafting.pause.DraftPause.note`."""
        self._debt = max(self._debt - saved / seconds, 0.0)
        if self._debt > MOST_DEBT:
            self._is_spent = True
