"""Handlers of ``/score``, ``/rerank`` and ``/classify``."""

from __future__ import annotations

import quart

from trioserve.http.api.generations import renamed
from trioserve.http.api.pooling.asked import Asked, check_truncation, text_usage
from trioserve.http.api.pooling.label_scores import score_labels
from trioserve.http.api.pooling.schemas import (
    ClassifiedText,
    ClassifyRequest,
    ClassifyResponse,
    RankedDocument,
    RerankDocument,
    RerankRequest,
    RerankResponse,
    ScoredPair,
    ScoreRequest,
    ScoreResponse,
)
from trioserve.http.api.service import Service, json_response
from trioserve.pooling.inputs import as_items
from trioserve.protocol.errors import InvalidRequest

_FIRST = ("text_1", "queries", "query", "data_1")
_SECOND = ("text_2", "documents", "items", "data_2")


class ScoreEndpoints:
    """The handlers, over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def score(self) -> quart.Response:
        """Handle ``POST /score`` and ``POST /v1/score``."""
        service = self._service
        request = await service.read(ScoreRequest)
        asked = Asked.of(service, "score", request.request_id, request.timeout)
        with service.deadline(request.timeout).enforced():
            model = service.model(request.model)
            if service.engine.task == "generate":
                return json_response(await score_labels(service, request, asked, model))
            return json_response(await self._score_pairs(request, asked, model))

    async def _score_pairs(self, request: ScoreRequest, asked: Asked, model: str) -> ScoreResponse:
        service = self._service
        for name in ("label_token_ids", "apply_softmax", "item_first"):
            if getattr(request, name):
                raise InvalidRequest(
                    f"{name} is for models that generate: {service.engine.model_name} "
                    f"{service.engine.pooling.purpose}",
                    param=name,
                )
        first, firsts = _texts(request, _FIRST)
        second, seconds = _texts(request, _SECOND)
        service.check_number_of_prompts(len(seconds), second)
        service.note_texts([*firsts, *seconds])
        try:
            found = await service.engine.score(
                firsts,
                seconds,
                truncate_prompt_tokens=check_truncation(request),
                **asked.options,
            )
        except InvalidRequest as error:
            names = {"queries": first, "documents": second, "input": second}
            raise renamed(error, names) from error
        service.record.usage = found.usage
        return ScoreResponse(
            id=asked.id,
            object="list",
            created=asked.created,
            model=model,
            data=[ScoredPair(index=i, score=v) for i, v in enumerate(found.values.tolist())],
            usage=text_usage(found.usage),
        )

    async def rerank(self) -> quart.Response:
        """Handle ``POST /rerank``, ``POST /v1/rerank`` and ``POST /v2/rerank``."""
        service = self._service
        request = await service.read(RerankRequest)
        asked = Asked.of(service, "rerank", request.request_id, request.timeout)
        with service.deadline(request.timeout).enforced():
            model = service.model(request.model)
            texts = [each if isinstance(each, str) else each.text for each in request.documents]
            service.check_number_of_prompts(len(texts), "documents")
            service.note_texts([request.query, *texts])
            try:
                found = await service.engine.score(
                    request.query,
                    texts,
                    truncate_prompt_tokens=check_truncation(request),
                    **asked.options,
                )
            except InvalidRequest as error:
                raise renamed(error, {"queries": "query", "input": "documents"}) from error
            service.record.usage = found.usage
            # The sort is stable: of equal documents, the first comes first.
            order = (-found.values).argsort(kind="stable")[: request.top_n or None].tolist()
            results = [
                RankedDocument(index=index, relevance_score=float(found.values[index]))
                for index in order
            ]
            if request.return_documents is not False:
                for result in results:
                    result.document = RerankDocument(text=texts[result.index])
            return json_response(
                RerankResponse(
                    id=asked.id, model=model, results=results, usage=text_usage(found.usage)
                )
            )

    async def classify(self) -> quart.Response:
        """Handle ``POST /classify`` and ``POST /v1/classify``."""
        service = self._service
        request = await service.read(ClassifyRequest)
        asked = Asked.of(service, "classify", request.request_id or request.rid, request.timeout)
        with service.deadline(request.timeout).enforced():
            model = service.model(request.model)
            items = as_items(request.input)
            service.check_number_of_prompts(len(items), "input")
            service.note_texts(items)
            found = await service.engine.classify(
                items, truncate_prompt_tokens=check_truncation(request), **asked.options
            )
            service.record.usage = found.usage
            wanted = (request.use_activation, request.activation, request.softmax)
            shown = found.logits if False in wanted else found.probabilities
            data = [
                ClassifiedText(index=i, label=label, probs=row, num_classes=len(found.labels))
                for i, (label, row) in enumerate(zip(found.best, shown.tolist(), strict=True))
            ]
            return json_response(
                ClassifyResponse(
                    id=asked.id,
                    created=asked.created,
                    model=model,
                    data=data,
                    usage=text_usage(found.usage),
                )
            )


def _texts(request: ScoreRequest, names: tuple[str, ...]) -> tuple[str, list[str]]:
    """Return the name of the field that was given, and its texts.

    Raises:
        InvalidRequest: it holds token ids.
    """
    (name,) = [name for name in names if getattr(request, name) is not None]
    given = getattr(request, name)
    texts = [given] if isinstance(given, str) else list(given)
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(
            f"{name} holds token ids: pairs are made of texts, so that the model's special tokens "
            "stand where they should",
            param=name,
        )
    return name, texts
