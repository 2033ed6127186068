"""The route of SGLang's ``/generate``."""

from __future__ import annotations

from trioserve.http.api.route import GENERATING, Route
from trioserve.http.api.sglang.schemas import GenerateRequest, GenerateResponse

ROUTES = (
    Route(
        method="POST",
        rule="/generate",
        handler="generate",
        summary="Continue one prompt or several, with SGLang's fields",
        group="Generation",
        peers="SGLang",
        request=GenerateRequest,
        response=GenerateResponse,
        events=GenerateResponse,
        batch=True,
        errors=(404, *GENERATING),
    ),
)
