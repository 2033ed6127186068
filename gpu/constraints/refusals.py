"""Error texts for grammars that aren't served."""

from __future__ import annotations

import re

MAX_MESSAGE_CHARACTERS = 300

_SOURCE_QUOTE = re.compile(r"\d+ \||\^+$")
_REGEX_PLACE = re.compile(r"^at \d+\(\d+\): ")


class GrammarError(Exception):
    """A grammar can't be served; one line says why."""


def one_line(text: str) -> str:
    """Return llguidance's error as one line, without positions in texts that it has generated."""
    lines = [line.strip() for line in text.splitlines()]
    kept = [line for line in lines if line and not _SOURCE_QUOTE.match(line)]
    first = _REGEX_PLACE.sub("", kept[0]) if kept else "llguidance refuses it"
    # The parser of regular expressions quotes the whole pattern before its error.
    points = [line.removeprefix("error: ") for line in kept if line.startswith("error: ")]
    if points:
        return f"{_shortened(first, 120)} {_shortened(points[0], 170)}"
    return _shortened(first, MAX_MESSAGE_CHARACTERS)


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
