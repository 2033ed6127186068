"""The endpoints for operators: is it well, what does it count, what does it offer."""

from __future__ import annotations

import quart

from trioserve.http.openapi import build_document
from trioserve.http.routes import served_routes
from trioserve.http.service import Service, json_response
from trioserve.http.utilities.schemas import HealthReply
from trioserve.metrics import CONTENT_TYPE_LATEST
from trioserve.task_dump import dump_tasks

__all__ = ["AdminEndpoints"]


class AdminEndpoints:
    """The handlers, over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self) -> quart.Response:
        """``GET /health``: 200 while new requests can be computed, else 503."""
        word = await self._service.whole.health_word()
        return json_response(HealthReply(word), 200 if word == "ok" else 503)

    async def metrics(self) -> quart.Response:
        """``GET /metrics``, in Prometheus' text format."""
        body = await self._service.whole.metrics()
        return quart.Response(body, content_type=CONTENT_TYPE_LATEST)

    async def tasks(self) -> quart.Response:
        """``GET /debug/tasks``: for people."""
        return quart.Response(dump_tasks(), content_type="text/plain; charset=utf-8")

    async def openapi(self) -> quart.Response:
        """``GET /openapi.json``."""
        engine, config = self._service.engine, self._service.config
        return json_response(
            build_document(
                served_routes(config),
                root_path=config.root_path,
                vocab_size=min(engine.vocab_size, engine.tokenizer.vocab_size),
            )
        )
