"""The stream of ``GET /kv_cache_events``: the prefix caches and the load of all workers.

The first event, ``server``, names the models; another one follows when they change. Each event
``changes`` has what changed since the one before. The stream ends when the server drains.
"""

from __future__ import annotations

import msgspec
import trio

from trioserve.http.api.server_api import TakeChanges
from trioserve.http.api.service import Service
from trioserve.http.api.sse import FeedBody, named_event
from trioserve.protocol.errors import Draining

MIN_INTERVAL = 0.01
"""Seconds between two batches of changes, so that a quick engine fills them."""


class ServedModels(msgspec.Struct, frozen=True, kw_only=True):
    """The server of a stream."""

    models: list[str]
    """Names that requests may give, with those of adapters."""
    page_size: int
    """Tokens of a page."""


class CacheStream(FeedBody):
    """Body of the stream. A batch is taken when the one before has left the server."""

    def __init__(self, service: Service) -> None:
        super().__init__()
        self._service = service
        self._take: TakeChanges | None = None
        self._told: ServedModels | None = None
        self._due = 0.0
        self._ended = False

    async def __aenter__(self) -> CacheStream:
        if self._service.engine.draining:
            raise Draining("the server is shutting down")
        self._take = await self._scope.enter_async_context(self._service.server_api.read_cache())
        return self

    async def __anext__(self) -> bytes:
        served = self._served()
        if served != self._told:
            self._told = served
            return named_event("server", served)
        if self._ended:
            raise StopAsyncIteration
        await trio.sleep_until(self._due)
        self._ended = self._service.engine.draining
        assert self._take is not None
        changes = await self._take()
        self._due = trio.current_time() + (MIN_INTERVAL if changes.complete else 0)
        return named_event("changes", changes)

    def _served(self) -> ServedModels:
        service = self._service
        adapters = (each.name for each in service.engine.adapters)
        return ServedModels(
            models=[*service.model_names, *adapters], page_size=service.engine.ready.page_size
        )
