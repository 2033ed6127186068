"""The budget of a draft model, whose steps take time whether or not its drafts are accepted."""

from __future__ import annotations

import attrs

ALLOWED = 0.01
"""Share of the steps' time that drafts may cost in the long run."""
MOST_DEBT = 4.0
"""Debt in steps from which on there are no drafts until it is paid off."""
MOST_SAVED = 16.0
"""Steps that drafts may have saved in advance, so that a change of the texts is no surprise."""
SPREAD = 1 / 64
"""Part of the time for prompts that becomes debt with each step. A draft model computes a prompt
before its first drafts for it, which are to have the time to make up for it.
"""
_MOST_AT_ONCE = 16.0
"""Most steps that one step counts as: it may have been disturbed."""


@attrs.define
class DraftBudget:
    """The debt of drafts that cost more than they save.

    A draft model computes the whole prompt of a sequence before it drafts for it, so a short trial
    costs nearly as much as a long one. What one sequence shows holds for most others: other than
    :class:`~gpu.sampling.drafting.pause.DraftPause`, this has a memory beyond them.
    """

    _debt: float = attrs.field(init=False, default=0.0)
    """Steps' time that drafts cost, less what they saved and were allowed; at least
    ``-MOST_SAVED``.
    """
    _spread: float = attrs.field(init=False, default=0.0)
    """Steps' time for prompts that isn't debt yet."""
    _is_spent: bool = attrs.field(init=False, default=False)

    def open(self) -> None:
        """Do nothing: a sequence that begins doesn't pay for those before it."""

    def includes(self, num_sequences: int) -> bool:
        """Return whether the next step has no drafts; count it."""
        due = self._spread * SPREAD
        self._spread -= due
        # What nothing was saved for isn't allowed in advance.
        self._debt = self._debt + due - (ALLOWED if self._debt + due > 0 else 0.0)
        if self._debt > MOST_DEBT:
            self._is_spent = True
        elif self._debt + self._spread <= ALLOWED:
            self._is_spent = False
        return self._is_spent

    def note(self, num_rows: int, saved: float, seconds: float, *, has_drafts: bool) -> None:
        """See :meth:`gpu.sampling.drafting.pause.DraftPause.note`."""
        cost = min(-saved / seconds, _MOST_AT_ONCE)
        if has_drafts:
            self._debt = max(self._debt + cost, -MOST_SAVED)
        else:
            self._spread += cost
