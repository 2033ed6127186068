"""Handlers for operators: health, metrics, tasks, and the OpenAPI document."""

from __future__ import annotations

import msgspec
import quart
import trio

from trioserve.http.api.openapi import build_document
from trioserve.http.api.routes import served_routes
from trioserve.http.api.service import Service, json_response
from trioserve.http.api.utilities.schemas import HealthReply
from trioserve.observability.metrics import CONTENT_TYPE_LATEST
from trioserve.observability.task_dump import dump_tasks


class AdminEndpoints:
    """The handlers, over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._document: bytes | None = None
        self._document_lock = trio.Lock()

    async def health(self) -> quart.Response:
        """Handle ``GET /health``: 200 while new requests can be computed, else 503."""
        word = await self._service.server_api.health_word()
        return json_response(HealthReply(word), 200 if word == "ok" else 503)

    async def metrics(self) -> quart.Response:
        """Handle ``GET /metrics``, in Prometheus' text format."""
        body = await self._service.server_api.metrics()
        return quart.Response(body, content_type=CONTENT_TYPE_LATEST)

    async def tasks(self) -> quart.Response:
        """Handle ``GET /debug/tasks``, which is text for a person."""
        return quart.Response(dump_tasks(), content_type="text/plain; charset=utf-8")

    async def openapi(self) -> quart.Response:
        """Handle ``GET /openapi.json``."""
        async with self._document_lock:
            if self._document is None:
                self._document = await trio.to_thread.run_sync(self._make_document)
        return quart.Response(self._document, content_type="application/json")

    def _make_document(self) -> bytes:
        """Return the document's JSON, which takes a tenth of a second to make."""
        engine, config = self._service.engine, self._service.config
        return msgspec.json.encode(
            build_document(
                served_routes(config),
                root_path=config.root_path,
                vocab_size=min(engine.vocab_size, engine.tokenizer.vocab_size),
            )
        )
