r"""The syntax of stop regexes: parsing one into a tree.

The syntax is what Python, Rust and JavaScript have in common, with Python's meaning:

- characters, ``.``, sets such as ``[^a-z\d]``; ``\d \w \s`` and their opposites, which know all
  of Unicode; categories such as ``\p{L}`` and ``\p{Lu}``; ``\n \t \x41 \u00e9`` and the like;
- ``|``, ``(…)``, ``(?:…)``, ``(?P<name>…)``; ``* + ? {3} {3,} {3,5}``, with a ``?`` behind or not;
- ``^ $ \A \Z \b \B``;
- the flags ``i``, ``m``, ``s`` and ``x``: ``(?i)`` in front for all, ``(?i:…)`` for a part.

``$`` without the flag ``m`` is ``\Z``, the end. The parser refuses constructs that an automaton
can't match in bounded time, and its error names them: look-around, back references, recursion,
conditions, atomic groups, possessive repetition, verbs and fuzzy matching.
"""

from __future__ import annotations

import re

import attrs

from trioserve.text.regex_tree import (
    EMPTY,
    NAMED_CLASSES,
    Alternation,
    Assertion,
    Category,
    CharacterSet,
    Concatenation,
    Node,
    Repetition,
    forms_of,
)

MAX_DEPTH = 50
MAX_COUNT = 9999
"""Largest count in a repetition."""


class RegexError(ValueError):
    """The text isn't a regex, or uses unsupported syntax."""


def parse(pattern: str) -> Node:
    """Parse ``pattern`` and return its tree.

    Raises:
        RegexError: The text isn't a regex, or uses unsupported syntax.
    """
    return _Parser(pattern).parse()


_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_ASSERTIONS = {
    "A": Assertion.START,
    "Z": Assertion.END,
    "z": Assertion.END,
    "b": Assertion.BOUNDARY,
    "B": Assertion.NO_BOUNDARY,
}
_UNSUPPORTED_ESCAPES = {
    **dict.fromkeys("123456789gk", "a back reference"),
    **dict.fromkeys("GKLNRXmMhHQE", "an escape that is not supported"),
}
_UNICODE_CATEGORY = re.compile(
    r"\{(?P<not>\^?)(?P<name>L[ultmo]?|M[nce]?|N[dlo]?|P[cdseifo]?|S[mcko]?|Z[slp]?|C[cfson]?)\}"
    r"|(?P<letter>[LMNPSZC])"
)
_OCTAL = re.compile("[0-7]{0,2}")
_HEX = re.compile("[0-9a-fA-F]+")
_POSIX_CLASS = re.compile(r"\[:\^?[a-z]+:\]")
_COUNTS = re.compile(r"\{(?:(\d+)|(\d*),(\d*))\}")
_FUZZY = re.compile(r"\{[^{}]*?\b(?:\d+<=?)?[eids](?:<|=|:|,|\})")
_NAME = re.compile(r"[^\W\d]\w*>")
_LEADING_FLAGS = re.compile(r"\(\?((?!R\))[a-zA-Z]\w*)\)")
_FLAGS = re.compile(r"([a-zA-Z]*)(?:-([a-zA-Z]+))?([:)])")
_UNSUPPORTED_GROUPS = (
    (re.compile(r"[=!]|<[=!]"), "look-around"),
    (re.compile(r"P=|\("), "a back reference or condition"),
    (re.compile(r"P>|&|R|[+-]?\d"), "recursion"),
    (re.compile(r">"), "an atomic group"),
    (re.compile(r"\|"), "a branch reset"),
)


@attrs.frozen
class _Flags:
    i: bool = False
    m: bool = False
    s: bool = False
    x: bool = False


class _Parser:
    """Parser of one pattern, with a method for each construct."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._place = 0
        self._depth = 0

    def parse(self) -> Node:
        flags = _Flags()
        while match := self._skip_match(_LEADING_FLAGS):
            flags = self._changed(flags, match[1], "")
        node = self._choice(flags)
        if self._place < len(self._pattern):
            raise RegexError(f"unbalanced ) at position {self._place}")
        return node

    # ---- reading

    def _peek(self) -> str:
        return self._pattern[self._place : self._place + 1]

    def _take(self) -> str:
        character = self._peek()
        self._place += 1
        return character

    def _skip(self, wanted: str) -> bool:
        found = self._pattern.startswith(wanted, self._place)
        if found:
            self._place += len(wanted)
        return found

    def _skip_match(self, wanted: re.Pattern[str]) -> re.Match[str] | None:
        match = wanted.match(self._pattern, self._place)
        if match is not None:
            self._place = match.end()
        return match

    def _unsupported(self, what: str) -> RegexError:
        return RegexError(f"{what} (at position {self._place}) is not supported")

    # ---- constructs

    def _choice(self, flags: _Flags) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise RegexError(f"groups are nested deeper than {MAX_DEPTH}")
        options = [self._concatenation(flags)]
        while self._skip("|"):
            options.append(self._concatenation(flags))
        self._depth -= 1
        # Without duplicates, so that the work is proportional to the number of characters.
        options = list(dict.fromkeys(options))
        return options[0] if len(options) == 1 else Alternation(tuple(options))

    def _concatenation(self, flags: _Flags) -> Node:
        parts: list[Node] = []
        while self._peek() not in ("", "|", ")"):
            if self._skip_blank(flags) or self._skip_comment():
                continue
            part = self._repeated(self._atom(flags), flags)
            if part != EMPTY:
                parts.append(part)
        return parts[0] if len(parts) == 1 else Concatenation(tuple(parts))

    def _skip_blank(self, flags: _Flags) -> bool:
        """Skip a space or comment that the flag ``x`` allows."""
        if not flags.x:
            return False
        if self._skip("#"):
            end = self._pattern.find("\n", self._place)
            self._place = len(self._pattern) if end < 0 else end
            return True
        return self._peek() in " \t\n\r\f\v" and bool(self._take())

    def _skip_comment(self) -> bool:
        if not self._skip("(?#"):
            return False
        end = self._pattern.find(")", self._place)
        if end < 0:
            raise RegexError("missing ), a comment has no end")
        self._place = end + 1
        return True

    def _repeated(self, node: Node, flags: _Flags) -> Node:
        while self._skip_blank(flags):
            pass
        counts = self._counts()
        if counts is None:
            return node
        if self._skip("+"):
            raise self._unsupported("possessive repetition")
        self._skip("?")  # A lazy repetition has the same first end of a match.
        if self._counts() is not None:
            raise RegexError(f"multiple repeat at position {self._place}")
        return EMPTY if node == EMPTY or counts[1] == 0 else Repetition(node, *counts)

    def _counts(self) -> tuple[int, int | None] | None:
        """Take the repetition after an atom; None without one."""
        for sign, counts in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._skip(sign):
                return counts
        if self._peek() != "{":
            return None
        if _FUZZY.match(self._pattern, self._place):
            raise self._unsupported("fuzzy matching")
        match = self._skip_match(_COUNTS)
        if match is None:
            return None  # An ordinary brace
        if any(len(digits or "") > len(str(MAX_COUNT)) for digits in match.groups()):
            raise RegexError(f"a count is larger than {MAX_COUNT}")
        if match[1] is not None:
            return int(match[1]), int(match[1])
        least, most = int(match[2] or 0), int(match[3]) if match[3] else None
        if most is not None and most < least:
            raise RegexError(f"{match[0]}: the smaller count must come first")
        return least, most

    def _atom(self, flags: _Flags) -> Node:
        character = self._take()
        if character == "(":
            return self._group(flags)
        if character == "[":
            return self._set(flags)
        if character == "\\":
            return self._escape(flags)
        if character == ".":
            newline = frozenset() if flags.s else frozenset("\n")
            return CharacterSet(newline, negated=True)
        if character == "^":
            return Assertion.LINE_START if flags.m else Assertion.START
        if character == "$":
            return Assertion.LINE_END if flags.m else Assertion.END
        self._place -= 1
        if self._counts() is not None:
            raise RegexError(f"nothing to repeat at position {self._place}")
        return _literal(self._take(), flags)

    def _group(self, flags: _Flags) -> Node:
        if self._peek() == "*":
            raise self._unsupported("a verb")
        if self._skip("?"):
            flags = self._extension(flags)
        node = self._choice(flags)
        if not self._skip(")"):
            raise RegexError("missing ), unterminated group")
        return node

    def _extension(self, flags: _Flags) -> _Flags:
        """Take the text after ``(?`` and return the group's flags."""
        for kind, what in _UNSUPPORTED_GROUPS:
            if kind.match(self._pattern, self._place):
                raise self._unsupported(what)
        if self._skip("P<") or self._skip("<"):
            if self._skip_match(_NAME) is None:
                raise RegexError(f"bad name of a group at position {self._place}")
            return flags
        match = self._skip_match(_FLAGS)
        if match is None:
            raise RegexError(f"unknown kind of group at position {self._place}")
        if match[3] == ")":
            raise RegexError("flags for all must come first; write (?i:…) for a part")
        return self._changed(flags, match[1], match[2] or "")

    def _changed(self, flags: _Flags, on: str, off: str) -> _Flags:
        for flag in on + off:
            if flag not in "imsxu" or (flag in off and flag == "u"):
                raise RegexError(f"the flag {flag} is not supported; i, m, s and x are")
        changes = {flag: flag in on for flag in on + off if flag != "u"}
        return attrs.evolve(flags, **changes)

    # ---- characters

    def _escape(self, flags: _Flags) -> Node:
        character = self._peek()
        if character in _ASSERTIONS:
            self._place += 1
            return _ASSERTIONS[character]
        what = self._escaped()
        if isinstance(what, Category):
            return CharacterSet(categories=(what,))
        return _literal(what, flags)

    def _escaped(self) -> str | Category:
        """Take the text after a backslash, inside or outside of a set."""
        character = self._take()
        if not character:
            raise RegexError("a backslash at the end")
        if character in _UNSUPPORTED_ESCAPES:
            self._place -= 1
            raise self._unsupported(_UNSUPPORTED_ESCAPES[character] + f", \\{character}")
        if character.lower() in NAMED_CLASSES:
            return Category(character.lower(), negated=character.isupper())
        if character in "pP":
            return self._unicode_category(negated=character == "P")
        if character in _CONTROLS:
            return _CONTROLS[character]
        if character in _HEX_DIGITS:
            return self._hexadecimal(_HEX_DIGITS[character])
        if character == "0":
            octal = self._skip_match(_OCTAL)
            return chr(int(octal[0] if octal and octal[0] else "0", 8))
        if character.isascii() and character.isalpha():
            raise RegexError(f"bad escape \\{character} at position {self._place - 2}")
        return character

    def _unicode_category(self, *, negated: bool) -> Category:
        match = self._skip_match(_UNICODE_CATEGORY)
        if match is None:
            raise self._unsupported("a Unicode property besides general categories such as \\p{Lu}")
        return Category(match["name"] or match["letter"], negated is not bool(match["not"]))

    def _hexadecimal(self, digits: int) -> str:
        text = self._pattern[self._place : self._place + digits]
        if len(text) != digits or not _HEX.fullmatch(text) or int(text, 16) > 0x10FFFF:
            raise RegexError(f"an escape at position {self._place} wants {digits} hex digits")
        self._place += digits
        return chr(int(text, 16))

    def _set(self, flags: _Flags) -> CharacterSet:
        start = self._place - 1
        negated = self._skip("^")
        singles: set[str] = set()
        ranges: list[tuple[str, str]] = []
        categories: list[Category] = []
        first = True
        while first or self._peek() != "]":
            first = False
            low = self._member(start)
            if isinstance(low, Category):
                categories.append(low)
                continue
            at_range = self._peek() == "-" and self._pattern[self._place + 1 : self._place + 2]
            if not at_range or at_range == "]":
                singles.add(low)
                continue
            self._place += 1
            high = self._member(start)
            if isinstance(high, Category) or low > high:
                raise RegexError(f"bad character range at position {self._place}")
            ranges.append((low, high))
        self._place += 1
        if flags.i:
            singles.update(*map(forms_of, singles))
        return CharacterSet(
            frozenset(singles), tuple(ranges), tuple(categories), negated, ignores_case=flags.i
        )

    def _member(self, start: int) -> str | Category:
        """Take one member of the set that began at ``start``."""
        if self._skip_match(_POSIX_CLASS):
            raise self._unsupported("a POSIX class")
        character = self._take()
        if not character:
            raise RegexError(f"missing ], the set at position {start} has no end")
        if character != "\\":
            return character
        return "\b" if self._skip("b") else self._escaped()


def _literal(character: str, flags: _Flags) -> CharacterSet:
    if not flags.i:
        return CharacterSet(frozenset(character))
    return CharacterSet(forms_of(character), ignores_case=True)
