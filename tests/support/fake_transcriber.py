"""A transcriber without a model."""

from __future__ import annotations

from typing import Any

import attrs
import trio

from trioserve.engine.transcribing import AUDIO, OnText
from trioserve.protocol.errors import InvalidRequest
from trioserve.requests.generation import Usage
from trioserve.requests.speech.tasks import SpeechOptions
from trioserve.requests.speech.transcript import Segment, Transcript, Word

__all__ = ["TRANSCRIPT", "FakeTranscriber"]

SEGMENTS = (
    Segment(
        start=0.0,
        end=2.5,
        text=" Hello there.",
        token_ids=(5, 6),
        window_start=0.0,
        average_logprob=-0.25,
        no_speech_prob=0.125,
        temperature=0.4,
        words=(
            Word(start=0.25, end=1.5, text=" Hello"),
            Word(start=1.5, end=2.5, text=" there."),
        ),
    ),
    Segment(
        start=3661.25,
        end=3662.0,
        text=" A --> B",
        token_ids=(7,),
        window_start=3660.0,
        average_logprob=-0.5,
        no_speech_prob=0.25,
        temperature=0.0,
        words=(Word(start=3661.5, end=3662.0, text=" A --> B"),),
    ),
)
TRANSCRIPT = Transcript(
    text="Hello there. A --> B",
    language="en",
    duration=3662.1,
    segments=SEGMENTS,
    usage=Usage(prompt_tokens=8, completion_tokens=3, cached_tokens=0),
)


@attrs.define
class FakeTranscriber:
    """A transcriber that notes what it is asked, and gives one transcript, or an error."""

    asked: list[tuple[Any, SpeechOptions, str]] = attrs.field(factory=list)
    error: Exception | None = None
    """Raised after the first piece of the text."""
    silence: float = 0.0
    """Seconds before the second piece of the text."""
    is_cancelled: bool = False

    async def transcribe(
        self,
        audio: Any,
        options: SpeechOptions,
        request: Any,
        deadline: Any,
        on_text: OnText | None = None,
    ) -> Transcript:
        self.asked.append((audio.source, options, request.request_id))
        if audio.source == b"noise":
            raise InvalidRequest(f"{AUDIO}: the audio has an unknown format", param=AUDIO)
        if on_text is not None:
            await on_text("Hello there.")
            try:
                await trio.sleep(self.silence)
            except trio.Cancelled:
                self.is_cancelled = True
                raise
            if self.error is not None:
                raise self.error
            await on_text(" A --> B")
        return TRANSCRIPT
