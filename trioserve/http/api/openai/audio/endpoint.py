"""Handlers of ``/v1/audio/transcriptions`` and ``/v1/audio/translations``."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import quart

from trioserve.engine.transcribing import AUDIO, OnText
from trioserve.http.api.access_log import AccessRecord
from trioserve.http.api.generations import renamed
from trioserve.http.api.openai.audio.schemas import (
    AudioUsage,
    SpeechForm,
    TranscriptionForm,
    TranscriptReply,
    TranscriptSegment,
    TranscriptWord,
    TranslationForm,
)
from trioserve.http.api.openai.audio.stream import TranscriptEvents
from trioserve.http.api.openai.audio.subtitles import srt_of, vtt_of
from trioserve.http.api.service import Service, json_response
from trioserve.http.api.sse import stream_response
from trioserve.protocol.errors import InvalidRequest
from trioserve.requests.speech.tasks import SpeechTask
from trioserve.requests.speech.transcript import Transcript

_TIMED = ("srt", "verbose_json", "vtt")
"""Formats with the times of segments."""
_SEGMENTS: Collection[str] = ("segment",)
"""Parts that have times by default."""


class AudioEndpoints:
    """The handlers, over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def transcriptions(self) -> quart.Response:
        """Handle ``POST /v1/audio/transcriptions``."""
        service = self._service
        form = await service.read_form(TranscriptionForm)
        granularities = form.timestamp_granularities or _SEGMENTS
        arguments = {
            **self._arguments(form, "transcribe"),
            "language": form.language,
            "word_timestamps": "word" in granularities,
        }
        format = form.response_format or "json"
        if form.timestamp_granularities and format != "verbose_json":
            raise InvalidRequest(
                "timestamp_granularities needs the response_format verbose_json",
                param="timestamp_granularities",
            )
        if not form.stream:
            return await self._answer(form, arguments, granularities)
        if format in _TIMED:
            raise InvalidRequest(
                f"stream is for the formats json and text, not {format}", param="stream"
            )
        record = service.record

        async def transcribe(on_text: OnText) -> Transcript:
            return await self._transcript(form, {**arguments, "on_text": on_text}, record)

        return stream_response(TranscriptEvents(transcribe, service.config.keep_alive_interval))

    async def translations(self) -> quart.Response:
        """Handle ``POST /v1/audio/translations``."""
        form = await self._service.read_form(TranslationForm)
        return await self._answer(form, self._arguments(form, "translate"))

    def _arguments(self, form: SpeechForm, task: SpeechTask) -> dict[str, Any]:
        """Return the engine's arguments."""
        service = self._service
        service.model(form.model)
        record = service.record
        return {
            "task": task,
            "prompt": form.prompt or "",
            "temperature": form.temperature,
            "condition_on_previous_text": bool(form.condition_on_previous_text),
            "timestamps": form.response_format in _TIMED,
            "request_id": f"{task}-{record.request_id}",
            "timeout": form.timeout,
            "arrived": record.started,
            "tenant": record.tenant,
            "traceparent": record.traceparent,
            "tracestate": record.tracestate,
        }

    async def _transcript(
        self, form: SpeechForm, arguments: dict[str, Any], record: AccessRecord
    ) -> Transcript:
        try:
            found = await self._service.engine.transcribe(form.file, **arguments)
        except InvalidRequest as error:
            raise renamed(error, {AUDIO: "file"}) from error
        record.usage = found.usage
        return found

    async def _answer(
        self,
        form: SpeechForm,
        arguments: dict[str, Any],
        granularities: Collection[str] = _SEGMENTS,
    ) -> quart.Response:
        found = await self._transcript(form, arguments, self._service.record)
        match form.response_format:
            case "text":
                return quart.Response(f"{found.text}\n", content_type="text/plain; charset=utf-8")
            case "srt":
                return quart.Response(
                    srt_of(found.segments), content_type="text/plain; charset=utf-8"
                )
            case "vtt":
                return quart.Response(
                    vtt_of(found.segments), content_type="text/vtt; charset=utf-8"
                )
        reply = TranscriptReply(found.text, AudioUsage(math.ceil(found.duration)))
        if form.response_format == "verbose_json":
            reply.task = arguments["task"]
            reply.language, reply.duration = found.language, found.duration
            if "segment" in granularities:
                reply.segments = _segments(found)
            if "word" in granularities:
                reply.words = [
                    TranscriptWord(each.text.strip(), each.start, each.end) for each in found.words
                ]
        return json_response(reply)


def _segments(found: Transcript) -> list[TranscriptSegment]:
    return [
        TranscriptSegment(
            id=number,
            seek=round(each.window_start * 100),
            start=each.start,
            end=each.end,
            text=each.text,
            tokens=list(each.token_ids),
            temperature=each.temperature,
            avg_logprob=each.average_logprob,
            compression_ratio=each.compression_ratio,
            no_speech_prob=each.no_speech_prob,
        )
        for number, each in enumerate(found.segments)
    ]
