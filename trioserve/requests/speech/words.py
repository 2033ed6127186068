"""The words of a transcript: tokens joined by Whisper's published rules, and their times."""

from __future__ import annotations

import codecs
import statistics
import string
from collections.abc import Callable, Iterable, Iterator, Sequence

import attrs

from trioserve.model_files.speech_config import SpeechConfig, SpeechTask
from trioserve.requests.speech.transcript import Segment, Word

WITHOUT_SPACES = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
"""Codes of languages without spaces between words; each character counts as one."""
OPENING = "\"'“¡¿([{-"
"""Punctuation that belongs to the word behind it, if a space precedes it."""
CLOSING = "\"'.\u3002,\uff0c!\uff01?\uff1f:\uff1a\u201d)]}\u3001"
"""Punctuation that belongs to the word before it; half of it is Chinese and Japanese."""
MOST_OUTSIDE = 0.5
"""Most seconds of a word outside its segment; of a longer one they are cut off."""
MOST_USUAL = 0.7
"""Most seconds that count as the usual length of a word."""


@attrs.frozen
class TokenWord:
    """A word's text, and its tokens from ``begin`` to before ``end``.

    The tokens are those of the word itself. Punctuation isn't spoken, so a pause is often its.
    """

    text: str
    begin: int
    end: int


def has_spaces(language: str, task: SpeechTask) -> bool:
    """Return True if there are spaces between the words of a text; translations are English."""
    return task == "translate" or language not in WITHOUT_SPACES


def with_words(
    segments: Sequence[Segment],
    times: Sequence[float],
    bytes_of: Callable[[int], bytes],
    config: SpeechConfig,
    *,
    is_spaced: bool,
) -> list[Segment]:
    """Return the segments of a window with their words.

    Args:
        segments: Segments in order.
        times: Times at which the tokens of their text begin, and the one at which the last ends.
        bytes_of: Returns the bytes of a token.
        config: The model's tokens.
        is_spaced: See :func:`words_of`.
    """
    words_of_segments = []
    first = 0
    for segment in segments:
        pieces = [bytes_of(token) for token in segment.token_ids if token < config.end_token]
        words = [
            Word(start=times[first + each.begin], end=times[first + each.end], text=each.text)
            for each in words_of(pieces, is_spaced=is_spaced)
        ]
        words_of_segments.append(_held(words, segment))
        first += len(pieces)
    _shorten_first(words_of_segments)
    return [
        attrs.evolve(segment, words=tuple(words))
        for segment, words in zip(segments, words_of_segments, strict=True)
    ]


def _shorten_first(words_of_segments: list[list[Word]]) -> None:
    """Shorten the first word of a window, which begins with the window whatever is spoken then."""
    spoken = [each.end - each.start for words in words_of_segments for each in words]
    usual = statistics.median([seconds for seconds in spoken if seconds > 0] or [0.0])
    first = words_of_segments[0][0]
    start = first.end - 2 * min(usual, MOST_USUAL)
    words_of_segments[0][0] = attrs.evolve(first, start=max(first.start, round(start, 3)))


def _held(words: list[Word], segment: Segment) -> list[Word]:
    """Return the words of a segment, without a pause before the first one or behind the last one.

    A pause may belong to a word beside it, but the segment's own times leave it out.
    """
    first = words[0]
    if first.start + MOST_OUTSIDE < segment.start < first.end:
        words[0] = attrs.evolve(first, start=segment.start)
    last = words[-1]
    if last.start < segment.end < last.end - MOST_OUTSIDE:
        words[-1] = attrs.evolve(last, end=segment.end)
    return words


def words_of(pieces: Iterable[bytes], *, is_spaced: bool) -> list[TokenWord]:
    """Return the words of a text. Together they are the text.

    Args:
        pieces: Bytes of each token.
        is_spaced: True if words begin with a space or with punctuation; False to have each
            character be one.
    """
    words: list[TokenWord] = []
    for each in _characters(pieces):
        if words and is_spaced and not _begins_word(each.text):
            words[-1] = TokenWord(words[-1].text + each.text, words[-1].begin, each.end)
        else:
            words.append(each)
    return _with_closing(_with_opening(words))


def _characters(pieces: Iterable[bytes]) -> Iterator[TokenWord]:
    """Yield the shortest runs of tokens that end where a character does."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text, begin, end = "", 0, 0
    for piece in pieces:
        text += decoder.decode(piece)
        end += 1
        if not decoder.getstate()[0]:
            yield TokenWord(text, begin, end)
            text, begin = "", end
    if begin < end:
        yield TokenWord(text + decoder.decode(b"", final=True), begin, end)


def _begins_word(text: str) -> bool:
    return text.startswith(" ") or text.strip() in string.punctuation


def _with_opening(words: list[TokenWord]) -> list[TokenWord]:
    """Return the words with opening punctuation, and with blanks, in front of the next ones."""
    found: list[TokenWord] = []
    for each in reversed(words):
        bare = each.text.strip()
        if found and (not bare or (each.text.startswith(" ") and bare in OPENING)):
            found[-1] = attrs.evolve(found[-1], text=each.text + found[-1].text)
        else:
            found.append(each)
    return found[::-1]


def _with_closing(words: list[TokenWord]) -> list[TokenWord]:
    """Return the words with closing punctuation, and with a blank at the end, behind them."""
    found: list[TokenWord] = []
    for each in words:
        if found and (not each.text.strip() or each.text in CLOSING):
            found[-1] = attrs.evolve(found[-1], text=found[-1].text + each.text)
        else:
            found.append(each)
    return found
