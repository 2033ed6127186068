"""Names of keys from the bytes that a terminal sends. No I/O."""

from __future__ import annotations

import re

import attrs

_SEQUENCE = re.compile(rb"\x1b[\[O][0-9;]*[A-Za-z~]")
_UNFINISHED = re.compile(rb"\x1b([\[O][0-9;]*)?")
_MAX_UNFINISHED = 32
_NAMES = {
    b"A": "up",
    b"B": "down",
    b"H": "home",
    b"F": "end",
    b"1~": "home",
    b"4~": "end",
    b"5~": "page up",
    b"6~": "page down",
    b"7~": "home",
    b"8~": "end",
}


@attrs.define(eq=False)
class KeyReader:
    """Decoder of bytes, in any pieces, to names of keys: a character, or ``up``, ``page down``."""

    _rest: bytes = b""

    def feed(self, data: bytes) -> list[str]:
        """Return the names of the keys that ``data`` completes; unknown keys are dropped."""
        data, self._rest = self._rest + data, b""
        keys: list[str] = []
        place = 0
        while place < len(data):
            if found := _SEQUENCE.match(data, place):
                name = _NAMES.get(found[0][2:])
                keys += [] if name is None else [name]
                place = found.end()
            elif _UNFINISHED.fullmatch(data, place) and len(data) - place < _MAX_UNFINISHED:
                self._rest = data[place:]
                break
            else:
                character = chr(data[place])
                keys += [character] if character.isprintable() and character.isascii() else []
                place += 1
        return keys
