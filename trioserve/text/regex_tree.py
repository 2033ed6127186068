"""The tree of a stop regex: its nodes, and the characters that they accept."""

from __future__ import annotations

import enum
import functools
import unicodedata
from collections.abc import Callable

import attrs


class Assertion(enum.Enum):
    """A condition on the characters before and after a place."""

    START = enum.auto()
    LINE_START = enum.auto()
    END = enum.auto()
    LINE_END = enum.auto()
    BOUNDARY = enum.auto()
    NO_BOUNDARY = enum.auto()


@attrs.frozen
class Category:
    """A named class of characters: ``d``, ``w``, ``s`` or a Unicode category."""

    name: str
    negated: bool = False

    def __contains__(self, character: str) -> bool:
        test = NAMED_CLASSES.get(self.name)
        if test is None:
            inside = unicodedata.category(character).startswith(self.name)
        else:
            inside = test(character)
        return inside is not self.negated


@attrs.frozen
class CharacterSet:
    """The characters that one place of a pattern accepts."""

    singles: frozenset[str] = frozenset()
    ranges: tuple[tuple[str, str], ...] = ()
    categories: tuple[Category, ...] = ()
    negated: bool = False
    ignores_case: bool = False

    def __contains__(self, character: str) -> bool:
        forms = forms_of(character) if self.ignores_case else (character,)
        return any(map(self._has, forms)) is not self.negated

    def _has(self, character: str) -> bool:
        return (
            character in self.singles
            or any(low <= character <= high for low, high in self.ranges)
            or any(character in category for category in self.categories)
        )


@attrs.frozen
class Concatenation:
    """Nodes in a row; without nodes it matches the empty text."""

    parts: tuple[Node, ...]


@attrs.frozen
class Alternation:
    """Alternative nodes."""

    options: tuple[Node, ...]


@attrs.frozen
class Repetition:
    """A node, ``least`` to ``most`` times; a ``most`` of None is no limit."""

    part: Node
    least: int
    most: int | None


Node = CharacterSet | Assertion | Concatenation | Alternation | Repetition
EMPTY = Concatenation(())


def is_word(character: str) -> bool:
    """Return True if ``\\w`` accepts ``character``."""
    return character.isalnum() or character == "_"


NAMED_CLASSES: dict[str, Callable[[str], bool]] = {
    "d": str.isdecimal,
    "w": is_word,
    "s": str.isspace,
}


@functools.lru_cache(maxsize=4096)
def forms_of(character: str) -> frozenset[str]:
    """Return the characters that equal ``character`` when case is ignored, itself included."""
    forms = {character}
    for _ in range(2):
        forms |= {other for form in forms for other in (form.lower(), form.upper())}
        forms = {form for form in forms if len(form) == 1}
    return frozenset(forms)
