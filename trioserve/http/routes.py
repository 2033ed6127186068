"""Every route: what the application serves and what ``/openapi.json`` describes, in one table."""

from __future__ import annotations

import attrs
import msgspec

from trioserve.http.chat_schemas import (
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
)
from trioserve.http.completion_schemas import CompletionRequest, CompletionResponse
from trioserve.http.native_schemas import GenerateRequest, GenerateResponse
from trioserve.http.openai_schemas import ModelCard, ModelList

__all__ = ["ROUTES", "HealthReply", "Route"]


class HealthReply(msgspec.Struct):
    """``ok``, or in one word why not: ``draining`` or ``no_worker``."""

    status: str


@attrs.frozen(kw_only=True)
class Route:
    """One path. ``handler`` is the name of the method that serves it.

    ``response`` is a class, or the content type of what is no JSON; ``events`` is the class of a
    stream's events where there can be one; a class in a ``batch`` may come in a list.
    """

    method: str
    rule: str
    handler: str
    summary: str
    request: type[msgspec.Struct] | None = None
    response: type[msgspec.Struct] | str
    events: type[msgspec.Struct] | None = None
    batch: bool = False


ROUTES = (
    Route(
        method="POST",
        rule="/v1/chat/completions",
        handler="chat_completions",
        summary="Answer a conversation",
        request=ChatCompletionRequest,
        response=ChatCompletionResponse,
        events=ChatCompletionChunk,
    ),
    Route(
        method="POST",
        rule="/v1/completions",
        handler="completions",
        summary="Continue one prompt or several",
        request=CompletionRequest,
        response=CompletionResponse,
        events=CompletionResponse,
    ),
    Route(
        method="GET",
        rule="/v1/models",
        handler="models",
        summary="The models that are served",
        response=ModelList,
    ),
    Route(
        method="GET",
        rule="/v1/models/<path:name>",
        handler="model",
        summary="One model that is served",
        response=ModelCard,
    ),
    Route(
        method="POST",
        rule="/generate",
        handler="generate",
        summary="Continue one prompt or several, with SGLang's fields",
        request=GenerateRequest,
        response=GenerateResponse,
        events=GenerateResponse,
        batch=True,
    ),
    Route(
        method="GET",
        rule="/health",
        handler="health",
        summary="Whether new requests can be computed; 503 if not",
        response=HealthReply,
    ),
    Route(
        method="GET",
        rule="/metrics",
        handler="metrics",
        summary="Counters and gauges for Prometheus",
        response="text/plain",
    ),
    Route(
        method="GET",
        rule="/openapi.json",
        handler="openapi",
        summary="This description",
        response="application/json",
    ),
)
