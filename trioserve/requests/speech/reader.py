"""The reader of speech: a file in, samples out, and encoder states of each window."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from trioserve.model_files.speech_config import SECONDS_OF_STATE, SpeechConfig
from trioserve.requests.embedded import SpeechPrompt
from trioserve.requests.media.audio import DEFAULT_RATE, Samples
from trioserve.requests.media.encoding import EncoderClient
from trioserve.requests.media.parts import AudioPart, DecodedAudio
from trioserve.requests.media.reader import MediaReader

RATE = DEFAULT_RATE
"""Samples a second, of all Whisper models."""
SAMPLES_OF_STATE = round(RATE * SECONDS_OF_STATE)
"""Samples for an encoder state."""


@attrs.frozen(eq=False, kw_only=True)
class SpeechReader:
    """Reads audio, and has a worker encode windows of it.

    Args:
        reader: Decodes files, and computes the features of a window.
        client: Has encoder states of features computed.
        config: The model.
    """

    reader: MediaReader
    client: EncoderClient
    config: SpeechConfig

    async def read(self, part: AudioPart, name: str) -> Samples:
        """Return the samples of audio at :data:`RATE`.

        Args:
            part: The audio.
            name: Its field in the request, for errors.

        Raises:
            InvalidRequest: It is refused; ``param`` is the name.
            EngineError: No process can be started.
        """
        found = await self.reader.read(part, name=name, is_processed=False)
        samples: Samples = found.arrays["samples"]
        return samples

    async def prompt(
        self, samples: Samples, start: float, token_ids: tuple[int, ...], name: str
    ) -> SpeechPrompt:
        """Return the prompt of the window of ``samples`` that begins after ``start`` seconds.

        Raises:
            InvalidRequest: The audio is refused; ``param`` is ``name``.
            EngineError: The engine is closed, or can't compute it.
        """
        window = np.ascontiguousarray(self._window(samples, start))
        processed = await self.reader.read(AudioPart(DecodedAudio(window.tobytes())), name=name)
        return SpeechPrompt(
            token_ids=token_ids,
            digest=processed.digest,
            states=await self.client.embeddings_of(processed, name),
        )

    async def token_times(
        self,
        samples: Samples,
        start: float,
        before: tuple[int, ...],
        text: Sequence[int],
        name: str,
    ) -> list[float]:
        """Return when the tokens of a window's text begin, and when it ends, in seconds.

        The times are from the window's beginning on.

        Args:
            samples: Samples of the audio.
            start: Seconds before the window.
            before: Tokens in front of the text, of which the last asks for text without timestamps.
            text: Tokens of the text.
            name: Name of the audio in the request, for errors.

        Raises:
            InvalidRequest: The audio is refused; ``param`` is ``name``.
            EngineError: The engine is closed, or can't compute it.
        """
        tokens = (*before, *text, self.config.end_token)
        prompt = await self.prompt(samples, start, tokens, name)
        num_frames = max(len(self._window(samples, start)) // SAMPLES_OF_STATE, 1)
        frames = await self.client.encoder.align_speech(
            list(tokens), len(before) - 1, num_frames, prompt.states
        )
        return [frame * SECONDS_OF_STATE for frame in frames]

    def _window(self, samples: Samples, start: float) -> Samples:
        """Return the samples of the window that begins after ``start`` seconds."""
        begin, count = round(start * RATE), round(self.config.window_seconds * RATE)
        return samples[begin : begin + count]
