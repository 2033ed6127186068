"""A search for regexes in a text, character by character, in bounded time and memory.

The automaton is Glushkov's (V. M. Glushkov, 1961). It has a *position* for each character set and
each assertion of the patterns, with repetitions written out, and for each position the positions
that may follow it. A set of positions is an integer with a bit for each. There is no backtracking:
a character costs at most a few steps per position.

A :class:`Search` has a *thread* for each place where a match may have begun: a set of positions. A
position of an earlier thread is removed from later ones: from there on both match the same, and the
earlier match is longer. So there are at most as many threads as positions, and each can still
become a match.

The search looks only for a match's first end, so no position follows one that ends a match.

An assertion is a position that the next character decides. At the end of the text so far, it is
decided as at the end of the text, for the moment.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Sequence

import attrs

from trioserve.text.regex_syntax import RegexError
from trioserve.text.regex_tree import (
    Alternation,
    Assertion,
    CharacterSet,
    Concatenation,
    Node,
    Repetition,
    is_word,
)

MAX_MOVES = 1024
"""Most moves that an automaton caches: below 1 MiB with 1,000 positions."""
MAX_SYMBOLS = 1024
"""Most characters that an automaton caches."""

_STEPS_OF_MOVE = 4
"""Steps to compute a move, besides one for each position of the thread."""

_OTHER, _WORD, _NEWLINE, _EDGE = range(4)
"""Kinds of characters next to a place, for assertions. An edge is an end of the text."""


class EmptyMatch(ValueError):
    """A pattern can match the empty text; ``pattern`` is its number."""

    def __init__(self, pattern: int) -> None:
        super().__init__(pattern)
        self.pattern = pattern


@attrs.frozen
class Match:
    """A match: its beginning, its end, and the number of its pattern."""

    start: int
    end: int
    pattern: int


@attrs.frozen
class Move:
    """A thread's move over one character."""

    ended: int
    """Assertions that end a match before the character."""
    completed: int
    """Positions that end a match with the character."""
    waiting: int
    """Positions of the thread after the character."""


@attrs.frozen(eq=False)
class Symbol:
    """Characters that all positions treat alike."""

    allowed: int
    """Positions that accept them."""
    kind: int
    may_begin: bool
    moves: tuple[dict[int, Move], ...] = attrs.field(factory=lambda: ({}, {}, {}, {}))
    """Cached moves, by the kind of the character before and the positions of the thread."""


@attrs.frozen
class NodePositions:
    """The positions that a node may begin with, and those that it may end with."""

    first: int = 0
    last: int = 0
    may_be_empty: bool = True


class Automaton:
    """The automaton of several patterns, shared by all searches for them.

    Args:
        patterns: Trees from :func:`~trioserve.text.regex_syntax.parse`.
        max_positions: Most positions of all patterns together.

    Raises:
        RegexError: The patterns need more positions.
        EmptyMatch: A pattern can match the empty text.
    """

    def __init__(self, patterns: Sequence[Node], *, max_positions: int) -> None:
        self._max_positions = max_positions
        self._labels: list[CharacterSet | Assertion] = []
        self._follow: list[int] = []
        parts = [self._build(pattern) for pattern in patterns]
        self.first = _union(part.first for part in parts)
        self._finals = [part.last for part in parts]
        self._final = _union(self._finals)
        by_label: dict[CharacterSet | Assertion, int] = {}
        for position, label in enumerate(self._labels):
            by_label[label] = by_label.get(label, 0) | 1 << position
        self._sets = [
            (label, positions)
            for label, positions in by_label.items()
            if isinstance(label, CharacterSet)
        ]
        self._assertions = {each: by_label.get(each, 0) for each in Assertion}
        self._satisfied = {
            (before, behind): self._satisfied_between(before, behind)
            for before in range(4)
            for behind in range(4)
        }
        all_assertions = _union(self._assertions.values())
        for number, part in enumerate(parts):
            if part.may_be_empty or self._resolve(part.first, all_assertions)[0]:
                raise EmptyMatch(number)
        self.has_assertions = bool(all_assertions)
        self._begins_at_once = not self.first & all_assertions
        self.symbols: dict[str, Symbol] = {}
        """Symbols of the characters seen so far; :meth:`add_symbol` adds to it."""
        self._alike: dict[tuple[int, int], Symbol] = {}
        self._num_moves = 0

    def add_symbol(self, character: str) -> tuple[Symbol, int]:
        """Classify ``character``; return its symbol and the number of steps that this took."""
        allowed = _union(positions for label, positions in self._sets if character in label)
        kind = _WORD if is_word(character) else _NEWLINE if character == "\n" else _OTHER
        if len(self.symbols) >= MAX_SYMBOLS:
            self._forget()
        symbol = self._alike.get((allowed, kind))
        if symbol is None:
            may_begin = not self._begins_at_once or bool(self.first & allowed)
            symbol = self._alike[allowed, kind] = Symbol(allowed, kind, may_begin)
        self.symbols[character] = symbol
        return symbol, len(self._sets)

    def move(self, waiting: int, before: int, symbol: Symbol) -> Move:
        """Return the move over ``symbol`` of a thread at the positions ``waiting``.

        ``before`` is the kind of the character before.
        """
        if self._num_moves >= MAX_MOVES:
            self._forget()
        self._num_moves += 1
        satisfied = self._satisfied[before, symbol.kind]
        ended, reached = self._resolve(waiting, satisfied)
        accepting = reached & symbol.allowed
        follow = self._follow
        behind = _union(follow[position] for position in _bits(accepting & ~self._final))
        move = Move(ended, accepting & self._final, behind)
        symbol.moves[before][waiting] = move
        return move

    def ended(self, waiting: int, before: int) -> int:
        """Return the positions that end a match if the text ends here."""
        return self._resolve(waiting, self._satisfied[before, _EDGE])[0]

    def pattern_of(self, positions: int) -> int:
        """Return the number of the first pattern that one of ``positions`` ends."""
        return next(number for number, final in enumerate(self._finals) if final & positions)

    def _forget(self) -> None:
        self.symbols.clear()
        self._alike.clear()
        self._num_moves = 0

    def _satisfied_between(self, before: int, behind: int) -> int:
        """Return the assertions that hold between characters of two kinds."""
        holds = {
            Assertion.START: before == _EDGE,
            Assertion.LINE_START: before in (_EDGE, _NEWLINE),
            Assertion.END: behind == _EDGE,
            Assertion.LINE_END: behind in (_EDGE, _NEWLINE),
            Assertion.BOUNDARY: (before == _WORD) is not (behind == _WORD),
            Assertion.NO_BOUNDARY: (before == _WORD) is (behind == _WORD),
        }
        return _union(self._assertions[each] for each in Assertion if holds[each])

    def _resolve(self, waiting: int, satisfied: int) -> tuple[int, int]:
        """Pass the satisfied assertions.

        Returns:
            The final positions among them, and ``waiting`` with the positions after them.
        """
        passed = 0
        while reached := waiting & satisfied & ~passed:
            passed |= reached
            waiting |= _union(self._follow[position] for position in _bits(reached & ~self._final))
        return passed & self._final, waiting

    # ---- positions out of nodes

    def _build(self, node: Node) -> NodePositions:
        if isinstance(node, Concatenation):
            return self._chain([self._build(part) for part in node.parts])
        if isinstance(node, Alternation):
            options = [self._build(option) for option in node.options]
            return NodePositions(
                _union(option.first for option in options),
                _union(option.last for option in options),
                any(option.may_be_empty for option in options),
            )
        if isinstance(node, Repetition):
            return self._repeat(node)
        if len(self._labels) == self._max_positions:
            raise RegexError(
                f"they are longer than {self._max_positions} characters together "
                "when repetitions are written out"
            )
        position = 1 << len(self._labels)
        self._labels.append(node)
        self._follow.append(0)
        return NodePositions(position, position, may_be_empty=False)

    def _chain(self, parts: Sequence[NodePositions]) -> NodePositions:
        """Connect each part to the next one, and further ones if those between may be empty."""
        last, behind, may_end = 0, 0, True
        for part in reversed(parts):
            self._link(part.last, behind)
            if may_end:
                last |= part.last
                may_end = part.may_be_empty
            behind = part.first | (behind if part.may_be_empty else 0)
        return NodePositions(behind, last, may_end)

    def _repeat(self, node: Repetition) -> NodePositions:
        number = max(node.least, 1) if node.most is None else node.most
        copies = [self._build(node.part) for _ in range(number)]
        if node.most is None:
            self._link(copies[-1].last, copies[-1].first)
        optional = [attrs.evolve(copy, may_be_empty=True) for copy in copies[node.least :]]
        return self._chain([*copies[: node.least], *optional])

    def _link(self, last: int, first: int) -> None:
        for position in _bits(last if first else 0):
            self._follow[position] |= first


class Search:
    """A search for the patterns of ``automaton`` in one text, which it doesn't store."""

    def __init__(self, automaton: Automaton) -> None:
        self._automaton = automaton
        self._threads: list[tuple[int, int]] = []
        """Start and positions of each thread, the earliest first."""
        self._before = _EDGE
        self.steps = 0
        """Number of steps so far, each below a microsecond."""

    @property
    def earliest(self) -> int | None:
        """Earliest start of a match that can still be completed."""
        return self._threads[0][0] if self._threads else None

    def forget(self, place: int) -> None:
        """Drop all matches that began before ``place``, and those merged with them."""
        while self._threads and self._threads[0][0] < place:
            del self._threads[0]

    def advance(self, character: str, place: int, *, armed: bool) -> Match | None:
        """Take the character at ``place``.

        Args:
            character: The character.
            place: Its index in the text.
            armed: True if a match that is complete now counts. If it doesn't, its longer forms
                don't count either.

        Returns:
            A match that ends with the character, or before it by an assertion; None without one.
            The match that ends first wins, then the longest.
        """
        symbol = self._automaton.symbols.get(character)
        if symbol is None:
            symbol, steps = self._automaton.add_symbol(character)
            self.steps += steps
        threads, before = self._threads, self._before
        self._before = symbol.kind
        if not threads and not symbol.may_begin:
            return None
        threads.append((place, self._automaton.first))
        self.steps += len(threads)
        self._threads = []
        moves = symbol.moves[before]
        seen = 0
        completed: Match | None = None
        for start, waiting in threads:
            move = moves.get(waiting)
            if move is None:
                move = self._automaton.move(waiting, before, symbol)
                self.steps += _STEPS_OF_MOVE + waiting.bit_count()
            if armed and move.ended:
                return Match(start, place, self._automaton.pattern_of(move.ended))
            if armed and move.completed and completed is None:
                pattern = self._automaton.pattern_of(move.completed)
                completed = Match(start, place + 1, pattern)
            behind = move.waiting & ~seen
            if behind:
                seen |= behind
                self._threads.append((start, behind))
        return completed

    def at_end(self, place: int) -> Match | None:
        """Return the match that is complete if the text ends at ``place``; None without one."""
        if not self._automaton.has_assertions:
            return None
        self.steps += len(self._threads)
        for start, waiting in self._threads:
            ended = self._automaton.ended(waiting, self._before)
            if ended:
                return Match(start, place, self._automaton.pattern_of(ended))
        return None


def _union(positions: Iterable[int]) -> int:
    return functools.reduce(operator.or_, positions, 0)


def _bits(positions: int) -> Iterator[int]:
    while positions:
        lowest = positions & -positions
        yield lowest.bit_length() - 1
        positions ^= lowest
