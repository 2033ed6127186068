"""Idle pages in the order of their eviction.

The lowest level goes first; within a level, the page that has been idle longest. Each operation
takes constant time: a level is a dictionary in order of insertion, and the levels that aren't empty
are the bits of an integer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs


@attrs.define(eq=False, repr=False)
class IdlePages:
    """Pages by number, each on a level; levels are small integers from 0 on."""

    _levels: dict[int, dict[int, None]] = attrs.field(init=False, factory=dict)
    _level_of: dict[int, int] = attrs.field(init=False, factory=dict)
    _occupied: int = attrs.field(init=False, default=0)
    """Bit i is set if there is a page on level i."""

    def __len__(self) -> int:
        return len(self._level_of)

    def __contains__(self, page: int) -> bool:
        return page in self._level_of

    def __iter__(self) -> Iterator[int]:
        return iter(self._level_of)

    def add(self, page: int, level: int) -> None:
        """Add ``page``, which must be new, behind all others of ``level``."""
        pages = self._levels.get(level)
        if pages is None:
            pages = self._levels[level] = {}
        pages[page] = None
        self._level_of[page] = level
        self._occupied |= 1 << level

    def discard(self, page: int) -> None:
        """Remove ``page`` if it is there."""
        level = self._level_of.pop(page, None)
        if level is not None:
            pages = self._levels[level]
            del pages[page]
            if not pages:
                self._occupied ^= 1 << level

    def move(self, page: int, level: int) -> None:
        """Move ``page``, if it is there, behind all others of ``level``."""
        if page in self._level_of:
            self.discard(page)
            self.add(page, level)

    def check(self, levels: Sequence[int]) -> None:
        """Assert that each page is on its level, by ``levels``, and that no page is missing."""
        for level, pages in self._levels.items():
            assert bool(pages) == bool(self._occupied >> level & 1)
            assert all(self._level_of[page] == level == levels[page] for page in pages)
        assert sum(map(len, self._levels.values())) == len(self._level_of)

    def first(self) -> int:
        """Return the page to be evicted first. There must be one."""
        lowest = (self._occupied & -self._occupied).bit_length() - 1
        return next(iter(self._levels[lowest]))
