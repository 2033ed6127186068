"""The engine's method for transcripts."""

from __future__ import annotations

from typing import Any

import attrs

from trioserve.config import EngineConfig
from trioserve.engine.transcribing import OnText, Transcriber
from trioserve.model_files.speech_config import SpeechTask
from trioserve.pooling.requests import Pooling
from trioserve.requests.deadline import Deadline
from trioserve.requests.media.parts import AudioPart
from trioserve.requests.options import RequestOptions
from trioserve.requests.speech.tasks import SpeechOptions
from trioserve.requests.speech.transcript import Transcript


class SpeechEngine:
    """The part of :class:`trioserve.Engine` for speech; :class:`Transcriber` does the work."""

    __slots__ = ()

    config: EngineConfig
    pooling: Pooling
    transcriber: Transcriber | None

    async def transcribe(
        self,
        audio: Any,
        *,
        task: SpeechTask = "transcribe",
        language: str | None = None,
        prompt: str = "",
        temperature: float | None = None,
        timestamps: bool = False,
        word_timestamps: bool = False,
        condition_on_previous_text: bool = False,
        on_text: OnText | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
        arrived: float | None = None,
        tenant: str = "",
        traceparent: str = "",
        tracestate: str = "",
    ) -> Transcript:
        """Return what is spoken in audio. Cancelling the call aborts it.

        The audio is computed in windows of 30 seconds, each a request of its own.
        :class:`SpeechOptions` describes the arguments from ``task`` to
        ``condition_on_previous_text``, :meth:`generate` those from ``request_id`` on.

        Args:
            audio: Bytes of a file, its path (:class:`os.PathLike`), a URL, a data URL or base64.
            on_text: Called with each piece of the text as it becomes known; together they are it.

        Raises:
            InvalidRequest: The model doesn't transcribe, or the audio or an argument is refused.
                All errors of :meth:`generate` may occur, too.
        """
        transcriber = self.transcriber
        if transcriber is None:
            raise self.pooling.refusal("transcribe speech")
        self.pooling.check_open()
        request = RequestOptions(
            request_id=request_id,
            timeout=timeout,
            arrived=arrived,
            tenant=tenant,
            traceparent=traceparent,
            tracestate=tracestate,
        )
        request.check()
        request = attrs.evolve(request, request_id=request.named())
        options = SpeechOptions(
            task=task,
            language=language,
            prompt=prompt,
            temperature=temperature,
            timestamps=timestamps,
            word_timestamps=word_timestamps,
            condition_on_previous_text=condition_on_previous_text,
        )
        with self.pooling.open.opened(request.named()):
            deadline = Deadline.of(timeout, arrived, self.config)
            part = AudioPart(audio)
            return await transcriber.transcribe(part, options, request, deadline, on_text)
