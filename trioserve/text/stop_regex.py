r"""A search for stop regexes and stop strings in text that comes in pieces, without I/O.

The patterns come from clients, so an automaton in Python matches them
(:mod:`~trioserve.text.regex_automaton`). Its time is linear in the text, it can't damage memory,
and after each character it knows where a match may have begun. (RE2 and Rust's engine are linear,
too, but they search complete texts and don't report that.) :mod:`~trioserve.text.regex_syntax` has
the syntax.

Which match wins
----------------
As with stop strings, the first character that completes a match ends the output. If it completes
several, the longest wins, and a stop string wins over an equally long regex match. The text is cut
where the match begins, or after it if ``include`` is set. The result names the stop string or the
pattern, as in SGLang. So a ``+`` or ``*`` at the end of a pattern has no effect.

``$``, ``\b`` and the like also hold at the end of the text so far, which is a token's end.

A match that is complete before the matcher is *armed* is text, and so are its longer forms. A match
that began earlier but is completed later counts.

What may be sent
----------------
Text is sent up to the first place where a still incomplete match may have begun.

Bounds
------
- Patterns are short, also with their repetitions written out. A request's automaton is built once
  and caches at most about 1 MiB.
- A match is at most ``MAX_MATCH_CHARACTERS`` long, and no more text is held back. The beginning of
  a longer match is dropped, with the beginnings inside it that were merged with it.
- The outputs of a request may together take ``STEPS_AT_FIRST`` steps, and ``STEPS_PER_PIECE`` more
  for each piece of text. A step takes about half a microsecond; usual patterns take one or two per
  character. Past these bounds the request is refused.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import attrs

from trioserve.protocol.errors import InvalidRequest
from trioserve.text.regex_automaton import Automaton, EmptyMatch, Match, Search
from trioserve.text.regex_syntax import RegexError, parse
from trioserve.text.stop_strings import StopMatcher

MAX_PATTERN_CHARACTERS = 1024
"""Most characters in all patterns of a request together."""
MAX_EXPANDED_CHARACTERS = 512
"""Most characters with repetitions written out; a set or an assertion counts as one."""
MAX_MATCH_CHARACTERS = 4096
STEPS_AT_FIRST = 20_000
STEPS_PER_PIECE = 100


def check_stop_regex(patterns: Sequence[str]) -> None:
    """Check the stop regexes of a request.

    Raises:
        InvalidRequest: A pattern isn't a regex, uses unsupported syntax or matches the empty text;
            or the patterns are too large together.
    """
    if patterns:
        _automaton(tuple(patterns))


def _refuse(reason: str) -> InvalidRequest:
    return InvalidRequest(f"stop_regex {reason}", param="stop_regex")


@functools.lru_cache(maxsize=32)
def _automaton(patterns: tuple[str, ...]) -> Automaton:
    length = sum(map(len, patterns))
    if length > MAX_PATTERN_CHARACTERS:
        raise _refuse(
            f"must have at most {MAX_PATTERN_CHARACTERS} characters together, got {length}"
        )
    nodes = []
    for pattern in patterns:
        try:
            nodes.append(parse(pattern))
        except RegexError as error:
            raise _refuse(f"{pattern!r} is no valid regex: {error}") from error
    try:
        return Automaton(nodes, max_positions=MAX_EXPANDED_CHARACTERS)
    except EmptyMatch as error:
        raise _refuse(
            f"{patterns[error.pattern]!r} matches the empty text, so it would end every output"
        ) from error
    except RegexError as error:
        raise _refuse(
            f"must have at most {MAX_EXPANDED_CHARACTERS} characters when repetitions are written "
            "out"
        ) from error


@attrs.define(eq=False)
class SearchBudget:
    """The number of steps left for the searches of a request."""

    steps: int = STEPS_AT_FIRST

    def add_piece(self) -> None:
        """Allow the steps of one more piece of text."""
        self.steps = min(self.steps + STEPS_PER_PIECE, STEPS_AT_FIRST)


@attrs.frozen
class _Found:
    """A match: its beginning, its end, and its stop string or pattern."""

    start: int
    end: int
    stop: str


class RegexStopMatcher:
    """Filter that returns text up to the first match, like
    :class:`~trioserve.text.stop_strings.StopMatcher`.

    Args:
        stops: Stop strings.
        patterns: Stop regexes, checked by :func:`check_stop_regex`.
        budget: Steps, shared by a request's outputs.
        include: True to keep the match in the text.
    """

    def __init__(
        self,
        stops: Sequence[str],
        patterns: Sequence[str],
        budget: SearchBudget,
        *,
        include: bool = False,
    ) -> None:
        self._strings = StopMatcher(stops) if stops else None
        self._patterns = tuple(patterns)
        self._search = Search(_automaton(self._patterns))
        self._budget = budget
        self._include = include
        self._held = ""
        self._length = 0
        """Number of characters so far; ``_held`` are the last of them."""

    def feed(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Take ``text``; return the text that may be sent, and the stop string or pattern found.

        Raises:
            InvalidRequest: The patterns take too long.
        """
        if not text:
            return "", None
        self._budget.add_piece()
        found = self._find(text, armed=armed)
        self._held += text
        self._length += len(text)
        if found is None:
            return self._release(), None
        cut = found.end if self._include else found.start
        return self._held[: len(self._held) - (self._length - cut)], found.stop

    def flush(self) -> str:
        """Return the held-back text at the end of the output."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, *, armed: bool) -> _Found | None:
        """Search in ``text``, which follows the text so far."""
        search, strings, budget = self._search, self._strings, self._budget
        for place, character in enumerate(text, self._length):
            match = search.advance(character, place, armed=armed)
            stop = None if strings is None else strings.advance(character)
            if match is not None and match.end == place:
                return self._found(match)
            found = [] if match is None else [self._found(match)]
            if armed and stop is not None:
                found.insert(0, _Found(place + 1 - len(stop), place + 1, stop))
            if found:
                return self._longest(found, text[place + 1 - self._length :])
            if search.steps > budget.steps:
                raise _refuse("takes too long to search for")
        match = search.at_end(self._length + len(text)) if armed else None
        budget.steps -= search.steps
        search.steps = 0
        return None if match is None else self._found(match)

    def _longest(self, found: list[_Found], behind: str) -> _Found:
        """Return the longest match among ``found`` and those completed by the text ``behind``."""
        end = found[0].end
        if behind:
            match = self._search.advance(behind[0], end, armed=True)
        else:
            match = self._search.at_end(end)
        if match is not None and match.end == end:
            found.append(self._found(match))
        return min(found, key=operator.attrgetter("start"))

    def _found(self, match: Match) -> _Found:
        return _Found(match.start, match.end, self._patterns[match.pattern])

    def _release(self) -> str:
        self._search.forget(self._length - MAX_MATCH_CHARACTERS)
        if self._include:
            return self.flush()
        begun = self._search.earliest
        kept = max(
            0 if begun is None else self._length - begun,
            0 if self._strings is None else self._strings.num_matched,
        )
        held = self._held
        self._held = held[len(held) - kept :]
        return held[: len(held) - kept]
