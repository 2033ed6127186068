"""The routes of ``/v1/audio``."""

from __future__ import annotations

from trioserve.http.api.openai.audio.schemas import (
    TextDeltaEvent,
    TextDoneEvent,
    TranscriptionForm,
    TranscriptReply,
    TranslationForm,
)
from trioserve.http.api.route import GENERATING, Route

_TEXTS = ("text/plain", "text/vtt")

ROUTES = (
    Route(
        method="POST",
        rule="/v1/audio/transcriptions",
        handler="transcriptions",
        summary="The text that is spoken in an audio file",
        group="Speech",
        peers="OpenAI, vLLM, SGLang",
        request=TranscriptionForm,
        is_form=True,
        response=TranscriptReply,
        texts=_TEXTS,
        events=TextDeltaEvent | TextDoneEvent,
        errors=(404, *GENERATING),
    ),
    Route(
        method="POST",
        rule="/v1/audio/translations",
        handler="translations",
        summary="The text that is spoken in an audio file, in English",
        group="Speech",
        peers="OpenAI, vLLM",
        request=TranslationForm,
        is_form=True,
        response=TranscriptReply,
        texts=_TEXTS,
        errors=(404, *GENERATING),
    ),
)
