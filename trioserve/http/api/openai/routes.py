"""The routes of the list of models."""

from __future__ import annotations

from trioserve.http.api.openai.schemas import ModelCard, ModelList
from trioserve.http.api.route import Route

ROUTES = (
    Route(
        method="GET",
        rule="/v1/models",
        handler="models",
        summary="The models that are served",
        group="Models",
        peers="OpenAI, vLLM, SGLang",
        response=ModelList,
    ),
    Route(
        method="GET",
        rule="/v1/models/<path:name>",
        handler="model",
        summary="One model that is served",
        group="Models",
        peers="OpenAI, SGLang",
        response=ModelCard,
        errors=(404,),
    ),
)
