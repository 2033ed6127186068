"""The reader of speech: a file in, samples out, and encoder states of each window."""

from __future__ import annotations

import attrs
import numpy as np

from trioserve.model_files.speech_config import SpeechConfig
from trioserve.requests.embedded import SpeechPrompt
from trioserve.requests.media.audio import DEFAULT_RATE, Samples
from trioserve.requests.media.encoder import MediaEncoder
from trioserve.requests.media.encoding import embeddings_of
from trioserve.requests.media.parts import AudioPart, DecodedAudio
from trioserve.requests.media.reader import MediaReader

RATE = DEFAULT_RATE
"""Samples a second, of all Whisper models."""


@attrs.frozen(eq=False, kw_only=True)
class SpeechReader:
    """Reads audio, and has a worker encode windows of it.

    Args:
        reader: Decodes files, and computes the features of a window.
        encoder: Computes the encoder states of features.
        config: The model.
    """

    reader: MediaReader
    encoder: MediaEncoder
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
        begin, count = round(start * RATE), round(self.config.window_seconds * RATE)
        window = np.ascontiguousarray(samples[begin : begin + count])
        processed = await self.reader.read(AudioPart(DecodedAudio(window.tobytes())), name=name)
        return SpeechPrompt(
            token_ids=token_ids,
            digest=processed.digest,
            states=await embeddings_of(processed, self.encoder, name),
        )
