"""The route of ``/v1/completions``."""

from __future__ import annotations

from trioserve.http.api.openai.completions.schemas import CompletionRequest, CompletionResponse
from trioserve.http.api.route import GENERATING, Route

ROUTES = (
    Route(
        method="POST",
        rule="/v1/completions",
        handler="completions",
        summary="Continue one prompt or several",
        group="Generation",
        peers="OpenAI, vLLM, SGLang",
        request=CompletionRequest,
        response=CompletionResponse,
        events=CompletionResponse,
        errors=(404, *GENERATING),
    ),
)
