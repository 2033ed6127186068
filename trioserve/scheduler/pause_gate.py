"""Who may be computed at the moment: everybody, nobody, or those who came before somebody.

Whoever wants quiet (an operator, an exchange of weights) holds the gate by a name of its own, and
lets go of it by that name, so that one who is done doesn't end another's quiet.
"""

from __future__ import annotations

import attrs


@attrs.define(eq=False)
class PauseGate:
    """Holds back rows of plans. Pure bookkeeping; arrivals are numbers that grow."""

    _closed_by: set[str] = attrs.field(init=False, factory=set)
    _lines: dict[str, int] = attrs.field(init=False, factory=dict)
    """By whose name newcomers are held back, and the last arrival that isn't one."""

    @property
    def is_closed(self) -> bool:
        """Whether nobody may be computed."""
        return bool(self._closed_by)

    @property
    def is_open(self) -> bool:
        """Whether everybody may, whenever they came."""
        return not self._closed_by and not self._lines

    def close(self, holder: str) -> None:
        """Nobody is to be computed until :meth:`release` by the same name. Idempotent."""
        self._closed_by.add(holder)
        self._lines.pop(holder, None)

    def close_behind(self, holder: str, arrival: int) -> None:
        """Nobody who came after ``arrival`` is to enter until :meth:`release` by the same name."""
        self._lines[holder] = arrival
        self._closed_by.discard(holder)

    def release(self, holder: str) -> None:
        """``holder`` needs quiet no more. Idempotent."""
        self._closed_by.discard(holder)
        self._lines.pop(holder, None)

    def admits(self, arrival: int) -> bool:
        """Whether who came then may enter."""
        return not self._closed_by and all(arrival <= last for last in self._lines.values())
