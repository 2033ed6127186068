"""The routes for texts as a whole."""

from __future__ import annotations

from trioserve.http.api.pooling.embedding_schemas import (
    EmbeddingRequest,
    EmbeddingResponse,
    EncodeRequest,
    EncodeResponse,
)
from trioserve.http.api.pooling.schemas import (
    ClassifyRequest,
    ClassifyResponse,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from trioserve.http.api.route import GENERATING, Route

ROUTES = (
    Route(
        method="POST",
        rule="/v1/embeddings",
        handler="embeddings",
        summary="The embeddings of texts",
        group="Embeddings and scores",
        peers="OpenAI, vLLM, SGLang",
        request=EmbeddingRequest,
        response=EmbeddingResponse,
        errors=(404, *GENERATING),
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
        errors=(404, *GENERATING),
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
        errors=(404, *GENERATING),
    ),
    Route(
        method="POST",
        rule="/rerank",
        aliases=("/v1/rerank", "/v2/rerank"),
        handler="rerank",
        summary="Documents ranked by how well they match a query, as Jina and Cohere have it",
        group="Embeddings and scores",
        peers="vLLM, SGLang",
        request=RerankRequest,
        response=RerankResponse,
        errors=(404, *GENERATING),
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
        errors=(404, *GENERATING),
    ),
)
