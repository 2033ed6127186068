"""Transcripts as callers get them."""

from __future__ import annotations

import zlib

import attrs

from trioserve.requests.generation import Usage


def compression_ratio(text: str) -> float:
    """Return a text's bytes by those that zlib makes of it; much more than 2 for repetitions."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))


@attrs.frozen(kw_only=True)
class Word:
    """A word of a transcript, with its place in the audio in seconds."""

    start: float
    end: float
    text: str
    """Its text with the space and the punctuation beside it."""


@attrs.frozen(kw_only=True)
class Segment:
    """A part of a transcript, with its place in the audio in seconds."""

    start: float
    end: float
    text: str
    token_ids: tuple[int, ...]
    window_start: float
    """Beginning of the window that it was heard in."""
    average_logprob: float
    """Mean log-probability of the window's tokens."""
    no_speech_prob: float
    """Probability that there is no speech in the window."""
    temperature: float
    """Temperature at which the window's tokens were drawn."""
    words: tuple[Word, ...] = ()
    """Its words, if their times were asked for. Together they are the text."""

    @property
    def compression_ratio(self) -> float:
        """See :func:`compression_ratio`."""
        return compression_ratio(self.text)


@attrs.frozen(kw_only=True)
class Transcript:
    """The text that is spoken in audio."""

    text: str
    language: str
    """Code of the language that is spoken."""
    duration: float
    """Seconds of the audio."""
    segments: tuple[Segment, ...]
    """Its parts; without timestamps, each of a whole window."""
    usage: Usage
    """Tokens of all windows."""

    @property
    def words(self) -> tuple[Word, ...]:
        """The words of all segments, if their times were asked for."""
        return tuple(word for each in self.segments for word in each.words)
