"""Handlers of ``/v1/embeddings`` and ``/encode``: texts to vectors."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import quart

from trioserve.http.api.generations import renamed
from trioserve.http.api.pooling.asked import Asked, check_truncation, text_usage
from trioserve.http.api.pooling.embedding_schemas import (
    EmbeddedText,
    EmbeddingRequest,
    EmbeddingResponse,
    EncodedMeta,
    EncodeRequest,
    EncodeResponse,
)
from trioserve.http.api.service import Service, json_response
from trioserve.http.api.threads import run_if_long
from trioserve.pooling.inputs import as_items
from trioserve.protocol.errors import InvalidRequest

NUMBERS_AS_LONG_AS_A_LOGPROB = 64
"""Numbers of a vector that take as long to encode as one log-probability, the unit of
:mod:`trioserve.http.api.threads`.
"""

Result = TypeVar("Result")


class EmbeddingEndpoints:
    """The handlers, over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def embeddings(self) -> quart.Response:
        """Handle ``POST /v1/embeddings``."""
        service = self._service
        request = await service.read(EmbeddingRequest)
        asked = Asked.of(service, "embd", request.request_id or request.rid, request.timeout)
        with service.deadline(request.timeout).enforced():
            model = service.model(request.model)
            adapter, field = service.adapter(request.model, request.lora_path)
            items = as_items(request.input)
            service.check_number_of_prompts(len(items), "input")
            service.note_texts(items)
            normalize = request.normalize
            if request.use_activation is not None:
                normalize = request.use_activation
            try:
                found = await service.engine.embed(
                    items,
                    dimensions=request.dimensions,
                    normalize=normalize,
                    pooling=request.pooling,
                    cache_salt=request.cache_salt or "",
                    truncate_prompt_tokens=check_truncation(request),
                    adapter=adapter,
                    **asked.options,
                )
            except InvalidRequest as error:
                raise renamed(error, {"adapter": field}) from error
            service.record.usage = found.usage

            def answer() -> msgspec.Raw:
                as_base64 = request.encoding_format == "base64"
                response = EmbeddingResponse(
                    id=asked.id,
                    created=asked.created,
                    model=model,
                    data=[
                        EmbeddedText(index=i, embedding=_base64(v) if as_base64 else v.tolist())
                        for i, v in enumerate(found.vectors)
                    ],
                    usage=text_usage(found.usage),
                )
                return msgspec.Raw(msgspec.json.encode(response))

            return json_response(await run_if_many(found.vectors.size, answer))

    async def encode(self) -> quart.Response:
        """Handle ``POST /encode``."""
        service = self._service
        request = await service.read(EncodeRequest)
        asked = Asked.of(service, "embd", request.rid, request.timeout)
        with service.deadline(request.timeout).enforced():
            name = "text" if request.text is not None else "input_ids"
            given = request.text if request.text is not None else request.input_ids
            assert given is not None
            items = as_items(given, name)
            service.check_number_of_prompts(len(items), name)
            service.note_texts(items)
            try:
                found = await service.engine.embed(
                    items,
                    dimensions=request.dimensions,
                    adapter=request.lora_path or "",
                    **asked.options,
                )
            except InvalidRequest as error:
                raise renamed(error, {"input": name, "adapter": "lora_path"}) from error
            service.record.usage = found.usage
            listed = not isinstance(given, str) and not isinstance(given[0], int)

            def answer() -> msgspec.Raw:
                replies = [
                    _encoded(vector, asked.id, count)
                    for vector, count in zip(found.vectors, found.num_tokens, strict=True)
                ]
                return msgspec.Raw(msgspec.json.encode(replies if listed else replies[0]))

            return json_response(await run_if_many(found.vectors.size, answer))


async def run_if_many(num_numbers: int, work: Callable[[], Result]) -> Result:
    """Return the result of ``work``, from a thread if there are many numbers to encode."""
    return await run_if_long(num_numbers // NUMBERS_AS_LONG_AS_A_LOGPROB, work)


def _encoded(vector: npt.NDArray[np.float32], id: str, num_tokens: int) -> EncodeResponse:
    meta = EncodedMeta(id=id, finish_reason={"type": "stop"}, prompt_tokens=num_tokens)
    return EncodeResponse(embedding=vector.tolist(), meta_info=meta)


def _base64(vector: npt.NDArray[np.float32]) -> str:
    return base64.b64encode(np.ascontiguousarray(vector, dtype="<f4").tobytes()).decode()
