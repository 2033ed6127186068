"""Every route: what the application serves and what ``/openapi.json`` describes, in one table."""

from __future__ import annotations

from typing import Any

import attrs
import msgspec

from trioserve.http.chat.schemas import (
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
)
from trioserve.http.completions.schemas import CompletionRequest, CompletionResponse
from trioserve.http.control.schemas import (
    AbortManyRequest,
    AbortReply,
    AbortRequest,
    ContinueRequest,
    Done,
    FlushReply,
    FlushRequest,
    MemoryRequest,
    PauseReply,
    PauseRequest,
    UpdateWeightsRequest,
    UpdateWeightVersionRequest,
    WeightVersion,
)
from trioserve.http.feeds.schemas import IterationStats, KvCacheEvent
from trioserve.http.native.schemas import GenerateRequest, GenerateResponse
from trioserve.http.openai.schemas import ModelCard, ModelList
from trioserve.http.pooling.schemas import (
    ClassifyRequest,
    ClassifyResponse,
    EmbeddingRequest,
    EmbeddingResponse,
    EncodeRequest,
    EncodeResponse,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from trioserve.http.utilities.schemas import (
    DetokenizeRequest,
    DetokenizeResponse,
    HealthReply,
    Load,
    ModelInfo,
    SchedulerLoad,
    ServerInfo,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
    VersionReply,
    Welcome,
)

__all__ = ["GROUPS", "ROUTES", "Route"]

GROUPS = (
    "Generation",
    "Embeddings and scores",
    "Tokens",
    "Models",
    "The server",
    "Control",
    "Health",
)
"""What routes belong to, in the order in which the documentation shows them."""

_GENERATING = (429, 503, 504)


@attrs.frozen(kw_only=True)
class Route:
    """One endpoint. ``handler`` is the name of the method that serves it.

    ``response`` is the type of the answer, or the content type of what is no JSON of a class;
    ``events`` is the class of a stream's events where there can be one; a class in a ``batch`` may
    come in a list.
    """

    method: str
    rule: str
    handler: str
    summary: str
    group: str
    peers: str = ""
    """Whose endpoint it is."""
    aliases: tuple[str, ...] = ()
    """Other paths of the same endpoint."""
    request: type[msgspec.Struct] | None = None
    body_optional: bool = False
    """Whether the body may be left out."""
    response: Any
    events: type[msgspec.Struct] | None = None
    batch: bool = False
    errors: tuple[int, ...] = ()
    """Statuses of errors that not every endpoint has."""
    unwell: type[msgspec.Struct] | None = None
    """The class of the answer with the status 503, where that isn't an error like others."""
    control: bool = False
    """Whether it changes or shows what is an operator's alone: it then needs an admin key."""

    @property
    def rules(self) -> tuple[str, ...]:
        """All paths, the usual one first."""
        return (self.rule, *self.aliases)


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
        errors=(404, *_GENERATING),
    ),
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
        errors=(404, *_GENERATING),
    ),
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
        errors=_GENERATING,
    ),
    Route(
        method="POST",
        rule="/v1/embeddings",
        handler="embeddings",
        summary="The embeddings of texts",
        group="Embeddings and scores",
        peers="OpenAI, vLLM, SGLang",
        request=EmbeddingRequest,
        response=EmbeddingResponse,
        errors=(404, *_GENERATING),
    ),
    Route(
        method="POST",
        rule="/encode",
        handler="encode",
        summary="The embeddings of texts, with SGLang's fields",
        group="Embeddings and scores",
        peers="SGLang",
        request=EncodeRequest,
        response=EncodeResponse,
        batch=True,
        errors=_GENERATING,
    ),
    Route(
        method="POST",
        rule="/score",
        aliases=("/v1/score",),
        handler="score",
        summary="How well pairs of texts go together, or how probable labels are after items",
        group="Embeddings and scores",
        peers="vLLM, SGLang",
        request=ScoreRequest,
        response=ScoreResponse,
        errors=(404, *_GENERATING),
    ),
    Route(
        method="POST",
        rule="/rerank",
        aliases=("/v1/rerank", "/v2/rerank"),
        handler="rerank",
        summary="Documents by how well they go with a query, as Jina and Cohere have it",
        group="Embeddings and scores",
        peers="vLLM, SGLang",
        request=RerankRequest,
        response=RerankResponse,
        errors=(404, *_GENERATING),
    ),
    Route(
        method="POST",
        rule="/classify",
        aliases=("/v1/classify",),
        handler="classify",
        summary="The labels of texts",
        group="Embeddings and scores",
        peers="vLLM, SGLang",
        request=ClassifyRequest,
        response=ClassifyResponse,
        errors=(404, *_GENERATING),
    ),
    Route(
        method="POST",
        rule="/tokenize",
        aliases=("/v1/tokenize",),
        handler="tokenize",
        summary="The token ids of a text, of several, or of a chat",
        group="Tokens",
        peers="vLLM, SGLang",
        request=TokenizeRequest,
        response=TokenizeResponse,
        errors=(404, 429),
    ),
    Route(
        method="POST",
        rule="/detokenize",
        aliases=("/v1/detokenize",),
        handler="detokenize",
        summary="The text of token ids, or of several lists of them",
        group="Tokens",
        peers="vLLM, SGLang",
        request=DetokenizeRequest,
        response=DetokenizeResponse,
        errors=(404, 429),
    ),
    Route(
        method="GET",
        rule="/tokenizer_info",
        handler="tokenizer_info",
        summary="What the tokenizer is",
        group="Tokens",
        peers="vLLM",
        response=TokenizerInfo,
    ),
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
    Route(
        method="GET",
        rule="/model_info",
        aliases=("/get_model_info",),
        handler="model_info",
        summary="What the model is",
        group="Models",
        peers="SGLang",
        response=ModelInfo,
    ),
    Route(
        method="GET",
        rule="/",
        handler="welcome",
        summary="Who is here",
        group="The server",
        peers="SGLang",
        response=Welcome,
    ),
    Route(
        method="GET",
        rule="/version",
        handler="version",
        summary="The server's version",
        group="The server",
        peers="vLLM",
        response=VersionReply,
    ),
    Route(
        method="GET",
        rule="/server_info",
        aliases=("/get_server_info",),
        handler="server_info",
        summary="The server's options, without secrets, and what computes",
        group="The server",
        peers="vLLM, SGLang",
        response=ServerInfo,
    ),
    Route(
        method="GET",
        rule="/load",
        handler="load",
        summary="How much there is to do",
        group="The server",
        peers="vLLM",
        response=Load,
    ),
    Route(
        method="GET",
        rule="/get_load",
        handler="get_load",
        summary="How much there is to do, for each scheduler",
        group="The server",
        peers="SGLang",
        response=list[SchedulerLoad],
    ),
    Route(
        method="GET",
        rule="/metrics",
        handler="metrics",
        summary="Counters and gauges for Prometheus",
        group="The server",
        peers="vLLM, SGLang",
        response="text/plain",
    ),
    Route(
        method="GET",
        rule="/iteration_stats",
        handler="iteration_stats",
        summary="What each step did since this was asked last; the first time nothing",
        group="The server",
        peers="TensorRT-LLM",
        response=list[IterationStats],
    ),
    Route(
        method="POST",
        rule="/kv_cache_events",
        handler="kv_cache_events",
        summary="What came into the prefix cache or went out since this was asked last",
        group="The server",
        peers="TensorRT-LLM",
        response=list[KvCacheEvent],
        control=True,
    ),
    Route(
        method="GET",
        rule="/debug/tasks",
        handler="tasks",
        summary="What every task of the server is doing, for admins",
        group="The server",
        response="text/plain",
        control=True,
    ),
    Route(
        method="GET",
        rule="/openapi.json",
        handler="openapi",
        summary="This description",
        group="The server",
        peers="vLLM, SGLang",
        response="application/json",
    ),
    Route(
        method="POST",
        rule="/pause_generation",
        handler="pause_generation",
        summary="Compute nothing for the time being; answered once nothing is computed any more",
        group="Control",
        peers="SGLang",
        request=PauseRequest,
        body_optional=True,
        response=Done,
        control=True,
    ),
    Route(
        method="POST",
        rule="/continue_generation",
        aliases=("/resume",),
        handler="continue_generation",
        summary="End the pause",
        group="Control",
        peers="SGLang, vLLM",
        request=ContinueRequest,
        body_optional=True,
        response=Done,
        control=True,
    ),
    Route(
        method="GET",
        rule="/is_paused",
        handler="is_paused",
        summary="Whether there is a pause",
        group="Control",
        peers="vLLM",
        response=PauseReply,
        control=True,
    ),
    Route(
        method="POST",
        rule="/abort_request",
        handler="abort_request",
        summary="End requests by the beginning of their ids, or all",
        group="Control",
        peers="SGLang",
        request=AbortRequest,
        response=AbortReply,
        control=True,
    ),
    Route(
        method="POST",
        rule="/abort_requests",
        handler="abort_requests",
        summary="End requests by their ids",
        group="Control",
        peers="vLLM",
        request=AbortManyRequest,
        response=AbortReply,
        control=True,
    ),
    Route(
        method="POST",
        rule="/update_weights_from_disk",
        handler="update_weights_from_disk",
        summary="Serve other weights of the same model; answered once they serve",
        group="Control",
        peers="SGLang",
        request=UpdateWeightsRequest,
        response=Done,
        errors=(503,),
        control=True,
    ),
    Route(
        method="POST",
        rule="/update_weight_version",
        handler="update_weight_version",
        summary="Call the weights something else",
        group="Control",
        peers="SGLang",
        request=UpdateWeightVersionRequest,
        response=WeightVersion,
        control=True,
    ),
    Route(
        method="GET",
        rule="/weight_version",
        aliases=("/get_weight_version",),
        handler="weight_version",
        summary="What the weights are called",
        group="Control",
        peers="SGLang",
        response=WeightVersion,
    ),
    Route(
        method="POST",
        rule="/release_memory_occupation",
        aliases=("/release_memory",),
        handler="release_memory_occupation",
        summary="Give the worker's memory back for the time being; its process ends",
        group="Control",
        peers="SGLang, TensorRT-LLM",
        request=MemoryRequest,
        body_optional=True,
        response=Done,
        control=True,
    ),
    Route(
        method="POST",
        rule="/resume_memory_occupation",
        aliases=("/resume_memory",),
        handler="resume_memory_occupation",
        summary="Have a worker again; answered once it has loaded the model",
        group="Control",
        peers="SGLang, TensorRT-LLM",
        request=MemoryRequest,
        body_optional=True,
        response=Done,
        control=True,
    ),
    Route(
        method="POST",
        rule="/flush_cache",
        aliases=("/reset_prefix_cache",),
        handler="flush_cache",
        summary="Have no request find what has been computed up to now",
        group="Control",
        peers="SGLang, vLLM",
        request=FlushRequest,
        body_optional=True,
        response=FlushReply,
        control=True,
    ),
    Route(
        method="GET",
        rule="/flush_cache",
        handler="flush_cache",
        summary="The same",
        group="Control",
        peers="SGLang",
        response=FlushReply,
        control=True,
    ),
    Route(
        method="GET",
        rule="/health",
        handler="health",
        summary="Whether new requests can be computed; 503 if not",
        group="Health",
        peers="vLLM, SGLang",
        aliases=("/ping",),
        response=HealthReply,
        unwell=HealthReply,
    ),
    Route(
        method="POST",
        rule="/ping",
        handler="health",
        summary="The same, as vLLM has it",
        group="Health",
        peers="vLLM",
        response=HealthReply,
        unwell=HealthReply,
    ),
    Route(
        method="GET",
        rule="/health_generate",
        handler="health_generate",
        summary="Whether a token can be computed now, within 20 seconds; 503 if not",
        group="Health",
        peers="SGLang",
        response=HealthReply,
        unwell=HealthReply,
    ),
)
