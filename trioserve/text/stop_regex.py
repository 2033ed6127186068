"""Finding stop regexes, beside stop strings, in text that comes in pieces. Sans-IO.

Which match wins
----------------
After each piece, which is one token's text, every pattern is searched for in all the text so far;
so the output ends with the earliest token after which one of them matches. Of several matches the
one that ends first wins, then the longest, then a stop string before a regex. The text is cut where
it begins, or ends with it if ``include`` is set. What was found is named by the stop string or the
pattern itself, as SGLang does.

``$``, ``\\b`` and the like look at the end of the text so far. Patterns are those of the ``regex``
package without flags, which are Python's and some more; flags may be set within the pattern.

As with stop strings, a match that is complete before the matcher is *armed* is text; one that began
then and is completed later counts.

What may be sent
----------------
``regex`` can say where the text may end within a match (``partial=True``); from there on it is
held back. That is all but exact: a ``\\b`` or ``$`` at the end of the text counts as it stands.
So the last ``CONTEXT`` characters before what is held back are searched again, and of a match that
turns up in what was sent already, that much stays sent.

Bounds
------
A pattern comes from a client, and searching may take exponential time, compiling any amount of
memory. So:

- patterns are short, and their repetitions, which compiling writes out, are few;
- a match is at most ``MAX_MATCH_CHARACTERS`` long: no more is held back, and a match's beginning is
  forgotten when more has come since. A pattern sees at least ``CONTEXT`` characters before it;
- a search ends after ``SEARCH_SECONDS``, and the searches of a request's outputs together after
  ``SECONDS_AT_FIRST`` and ``SECONDS_PER_PIECE`` for each piece. (Usual ones take about 5 µs each.)
  Past these the request is refused.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence

import attrs
import regex

from trioserve.errors import InvalidRequest

__all__ = ["RegexStopMatcher", "SearchBudget", "check_stop_regex"]

MAX_PATTERN_CHARACTERS = 1024
"""Of all patterns of a request together: compiling the worst of them takes 50 ms."""
MAX_EXPANDED_CHARACTERS = 4096
"""The same, with repetitions written out."""
MAX_MATCH_CHARACTERS = 4096
CONTEXT = 128
SEARCH_SECONDS = 0.02
SECONDS_AT_FIRST = 0.1
SECONDS_PER_PIECE = 0.0002

_COUNT = regex.compile(r"(\)?)\s*\{\s*(\d+)")
_VERBOSE = regex.compile(r"\(\?[a-zA-Z0-9-]*x")

Pattern = regex.Pattern[str]


def check_stop_regex(patterns: Sequence[str]) -> None:
    """Check the stop regexes of a request.

    Raises:
        InvalidRequest: one is no regex, matches the empty text, or searches backwards; or they are
            too large together.
    """
    length = sum(map(len, patterns))
    if length > MAX_PATTERN_CHARACTERS:
        raise _refuse(
            f"must have at most {MAX_PATTERN_CHARACTERS} characters together, got {length}"
        )
    if sum(map(_expanded_characters, patterns)) > MAX_EXPANDED_CHARACTERS:
        raise _refuse(
            f"must have at most {MAX_EXPANDED_CHARACTERS} characters when repetitions are written "
            "out"
        )
    for pattern in patterns:
        _compile(pattern)


def _refuse(reason: str) -> InvalidRequest:
    return InvalidRequest(f"stop_regex {reason}", param="stop_regex")


def _expanded_characters(pattern: str) -> int:
    """At least as many characters as ``pattern`` has when ``x{9}`` is written as nine times x.

    Only what closes with a parenthesis can hold repetitions itself; with the verbose flag that is
    hard to see.
    """
    counts = [(bool(match[1]), int(match[2])) for match in _COUNT.finditer(pattern)]
    verbose = _VERBOSE.search(pattern) is not None
    outer = math.prod(max(count, 1) for of_group, count in counts if of_group or verbose)
    return (len(pattern) + sum(count for _, count in counts)) * outer


@functools.lru_cache(maxsize=64)
def _compile(pattern: str) -> Pattern:
    try:
        compiled = regex.compile(pattern, cache_pattern=False)
    except Exception as error:
        # Besides regex.error: RecursionError and whatever a pattern brings out of the parser.
        raise _refuse(f"{pattern!r} is no valid regex: {error}") from error
    if compiled.flags & regex.REVERSE:
        raise _refuse(f"{pattern!r} searches backwards, which isn't possible in a stream")
    try:
        matches_nothing = compiled.search("", timeout=SEARCH_SECONDS) is not None
    except TimeoutError:
        raise _too_slow(pattern) from None
    if matches_nothing:
        raise _refuse(f"{pattern!r} matches the empty text, so it would end every output")
    return compiled


def _too_slow(pattern: str) -> InvalidRequest:
    return _refuse(f"{pattern!r} takes too long to search for")


@attrs.define(eq=False)
class SearchBudget:
    """Processor time that is left for the searches of a request."""

    seconds: float = SECONDS_AT_FIRST


class RegexStopMatcher:
    """Passes text on, up to the first match in it, like
    :class:`~trioserve.text.stop_strings.StopMatcher`.

    Args:
        stops: stop strings.
        patterns: stop regexes, which :func:`check_stop_regex` lets pass.
        budget: shared by a request's outputs.
        include: whether what was found stays in the text.
    """

    def __init__(
        self,
        stops: Sequence[str],
        patterns: Sequence[str],
        budget: SearchBudget,
        *,
        include: bool = False,
    ) -> None:
        self._conditions: list[tuple[str, Pattern]] = [
            *((stop, regex.compile(regex.escape(stop))) for stop in stops),
            *((pattern, _compile(pattern)) for pattern in patterns),
        ]
        self._include = include
        self._text = ""
        """Context, then what is held back. Places below are in it."""
        self._sent = 0
        self._search_from = 0
        self._skip = [0] * len(self._conditions)
        """Before this, each condition's matches were complete too early to count."""
        self._budget = budget

    def feed(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Take ``text``; give back what may be sent now, and the stop that was found.

        Raises:
            InvalidRequest: a pattern takes too long.
        """
        if not text:
            return "", None
        self._text += text
        self._budget.seconds += SECONDS_PER_PIECE
        hold_from = len(self._text)
        found: tuple[int, int, int] | None = None
        for which in range(len(self._conditions)):
            match = self._first_match(which, armed=armed)
            if match is None:
                continue
            if match.partial:
                hold_from = min(hold_from, match.start())
            else:
                key = (match.end(), match.start(), which)
                found = key if found is None else min(found, key)
        if found is None:
            return self._release(hold_from), None
        end, start, which = found
        return self._text[self._sent : end if self._include else start], self._conditions[which][0]

    def flush(self) -> str:
        """The text that was held back, which no match can claim any more."""
        held = self._text[self._sent :]
        self._sent = len(self._text)
        return held

    def _first_match(self, which: int, *, armed: bool) -> regex.Match[str] | None:
        """The first match of a condition; without one, where one may have begun (``partial``)."""
        while True:
            place = max(self._search_from, self._skip[which])
            if place > len(self._text):
                return None
            match = self._search(which, place)
            if match is None or match.partial or armed:
                return match
            self._skip[which] = match.start() + 1

    def _search(self, which: int, place: int) -> regex.Match[str] | None:
        stop, pattern = self._conditions[which]
        if self._budget.seconds <= 0:
            raise _too_slow(stop)
        limit = min(SEARCH_SECONDS, self._budget.seconds)
        started = time.thread_time()
        try:
            return pattern.search(self._text, place, partial=True, timeout=limit)
        except TimeoutError:
            raise _too_slow(stop) from None
        finally:
            self._budget.seconds -= time.thread_time() - started

    def _release(self, hold_from: int) -> str:
        hold_from = max(hold_from, len(self._text) - MAX_MATCH_CHARACTERS)
        sent, self._sent = self._sent, max(self._sent, hold_from)
        if self._include:
            self._sent = len(self._text)
        sendable = self._text[sent : self._sent]
        # Twice: what is searched again has something before it as well. So nothing is searched
        # from the beginning of a text that was cut off, where ``^`` would match.
        self._forget(max(hold_from - 2 * CONTEXT, 0))
        self._search_from = max(hold_from - CONTEXT, 0) - max(hold_from - 2 * CONTEXT, 0)
        return sendable

    def _forget(self, length: int) -> None:
        self._text = self._text[length:]
        self._sent -= length
        self._skip = [max(place - length, 0) for place in self._skip]
