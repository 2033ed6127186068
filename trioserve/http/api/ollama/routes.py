"""The routes of Ollama's ``/api``."""

from __future__ import annotations

from trioserve.http.api.ollama.model_schemas import (
    OllamaModels,
    OllamaRunningModels,
    OllamaVersion,
    ShowRequest,
    ShowResponse,
)
from trioserve.http.api.ollama.schemas import (
    OllamaChatRequest,
    OllamaChatResponse,
    OllamaEmbeddingsRequest,
    OllamaEmbeddingsResponse,
    OllamaEmbedRequest,
    OllamaEmbedResponse,
    OllamaGenerateRequest,
    OllamaGenerateResponse,
)
from trioserve.http.api.ollama.writer import LINES
from trioserve.http.api.route import GENERATING, Route

__all__ = ["ROUTES"]

ROUTES = (
    Route(
        method="POST",
        rule="/api/chat",
        handler="ollama_chat",
        summary="Answer a conversation, with Ollama's fields",
        group="Generation",
        peers="Ollama, SGLang",
        request=OllamaChatRequest,
        response=OllamaChatResponse,
        events=OllamaChatResponse,
        stream_type=LINES,
        errors=(404, *GENERATING),
    ),
    Route(
        method="POST",
        rule="/api/generate",
        handler="ollama_generate",
        summary="Answer a prompt or continue it, with Ollama's fields",
        group="Generation",
        peers="Ollama, SGLang",
        request=OllamaGenerateRequest,
        response=OllamaGenerateResponse,
        events=OllamaGenerateResponse,
        stream_type=LINES,
        errors=(404, *GENERATING),
    ),
    Route(
        method="POST",
        rule="/api/embed",
        handler="ollama_embed",
        summary="The embeddings of texts, with Ollama's fields",
        group="Embeddings and scores",
        peers="Ollama",
        request=OllamaEmbedRequest,
        response=OllamaEmbedResponse,
        errors=(404, *GENERATING),
    ),
    Route(
        method="POST",
        rule="/api/embeddings",
        handler="ollama_embeddings",
        summary="The embedding of one text, with Ollama's older fields",
        group="Embeddings and scores",
        peers="Ollama",
        request=OllamaEmbeddingsRequest,
        response=OllamaEmbeddingsResponse,
        errors=(404, *GENERATING),
    ),
    Route(
        method="GET",
        rule="/api/tags",
        handler="ollama_tags",
        summary="The models that are served, as Ollama tells them",
        group="Models",
        peers="Ollama, SGLang",
        response=OllamaModels,
    ),
    Route(
        method="GET",
        rule="/api/ps",
        handler="ollama_ps",
        summary="The same, as they are loaded",
        group="Models",
        peers="Ollama",
        response=OllamaRunningModels,
    ),
    Route(
        method="POST",
        rule="/api/show",
        handler="ollama_show",
        summary="One model that is served, as Ollama tells it",
        group="Models",
        peers="Ollama, SGLang",
        request=ShowRequest,
        response=ShowResponse,
        errors=(404,),
    ),
    Route(
        method="GET",
        rule="/api/version",
        handler="ollama_version",
        summary="The server's version, at Ollama's path",
        group="The server",
        peers="Ollama",
        response=OllamaVersion,
    ),
)
