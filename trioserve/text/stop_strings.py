"""A search for stop strings in text that comes in pieces, without I/O.

Which match wins
----------------
Text is searched one character after another, so the result doesn't depend on how it is cut into
pieces. The first character that completes a stop string ends the output; if it completes several,
the longest wins. The text is cut where the stop string begins. (Of the stops ``"abcd"`` and
``"bc"``, the text ``abcd`` is ended by ``bc``, at its third character.)

A match counts only while the matcher is *armed*: a stop string that is complete before
``min_tokens`` tokens is plain text. One that began earlier but is completed later counts.

What may be sent
----------------
A character is held back while it belongs to the longest suffix of the text that is a proper prefix
of some stop string. All other characters are sent at once, so the beginning of a stop string is
never sent. With ``include`` set stop strings are part of the output, so nothing is held back at
all.

How
---
It has one table of Knuth, Morris and Pratt (1977) per stop string: ``table[n]`` is the length of
the longest proper prefix of the stop string that is also a suffix of its first n characters. A
matcher's state is one number per stop string: the length of its prefix that the text ends in. On
each character::

    while matched and stop[matched] != character:  matched = table[matched]
    if stop[matched] == character:                 matched += 1

The largest of these numbers is the length to be held back. Time is linear in the text for each stop
string; a table takes four bytes per character. While nothing is held back, a piece of text without
the first character of any stop string is returned after one scan.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence


@functools.lru_cache(maxsize=1024)
def _prefix_table(stop: str) -> array[int]:
    """Return ``table[n]`` for n from 0 to ``len(stop)``, as the module's text defines it."""
    table = array("I", [0, 0])
    matched = 0
    for character in stop[1:]:
        while matched and stop[matched] != character:
            matched = table[matched]
        if stop[matched] == character:
            matched += 1
        table.append(matched)
    return table


class StopMatcher:
    """Filter that returns text up to the first stop string.

    Args:
        stops: The stop strings: at least one, none of them empty.
        include: True to keep the stop string in the text.
    """

    __slots__ = ("_firsts", "_held", "_include", "_matched", "_stops", "_tables")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._tables = [_prefix_table(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._firsts = frozenset(stop[0] for stop in self._stops)
        self._include = include
        self._held = ""

    def feed(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Take ``text``; return the text that may be sent, and the stop string found.

        No text may be fed after a stop string was found.
        """
        if not self._held and self._firsts.isdisjoint(text) and not any(self._matched):
            return text, None
        for position, character in enumerate(text):
            found = self.advance(character)
            if found is not None and armed:
                return self._cut(text[: position + 1], found), found
        return self._release(text), None

    def flush(self) -> str:
        """Return the held-back text at the end of the output."""
        held, self._held = self._held, ""
        return held

    @property
    def num_matched(self) -> int:
        """Number of last characters that may begin a stop string."""
        # A stop string that didn't count is text; only its overlap with the next is held back.
        return max(
            table[matched] if matched == len(stop) else matched
            for stop, table, matched in zip(self._stops, self._tables, self._matched, strict=True)
        )

    def advance(self, character: str) -> str | None:
        """Take one character; return the longest stop string that it completes."""
        found: str | None = None
        for which, stop in enumerate(self._stops):
            table, matched = self._tables[which], self._matched[which]
            while matched and (matched == len(stop) or stop[matched] != character):
                matched = table[matched]
            if stop[matched] == character:
                matched += 1
            self._matched[which] = matched
            if matched == len(stop) and (found is None or len(stop) > len(found)):
                found = stop
        return found

    def _cut(self, text: str, found: str) -> str:
        if self._include:
            return text
        text = self._held + text
        self._held = ""
        return text[: len(text) - len(found)]

    def _release(self, text: str) -> str:
        if self._include:
            return text
        text = self._held + text
        sendable = len(text) - self.num_matched
        self._held = text[sendable:]
        return text[:sendable]
