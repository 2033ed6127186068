"""The route of ``/v1/chat/completions``."""

from __future__ import annotations

from trioserve.http.api.openai.chat.schemas import (
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
)
from trioserve.http.api.route import GENERATING, Route

ROUTES = (
    Route(
        method="POST",
        rule="/v1/chat/completions",
        handler="chat_completions",
        summary="Answer a conversation",
        group="Generation",
        peers="OpenAI, vLLM, SGLang",
        request=ChatCompletionRequest,
        response=ChatCompletionResponse,
        events=ChatCompletionChunk,
        errors=(404, *GENERATING),
    ),
)
