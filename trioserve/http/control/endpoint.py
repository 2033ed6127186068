"""Pausing, ending requests by name, emptying the cache: for whoever runs the server."""

from __future__ import annotations

from collections.abc import Iterable

import quart

from trioserve.http.control.schemas import (
    AbortManyRequest,
    AbortReply,
    AbortRequest,
    ContinueRequest,
    Done,
    FlushReply,
    FlushRequest,
    PauseReply,
    PauseRequest,
)
from trioserve.http.openai.fields import ID_PREFIXES
from trioserve.http.service import Service, json_response

__all__ = ["ControlEndpoints"]


class ControlEndpoints:
    """The handlers, over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def pause_generation(self) -> quart.Response:
        """``POST /pause_generation``: answered once nothing is computed any more."""
        request = await self._service.read_if_any(PauseRequest)
        await self._service.engine.pause(request.mode, refuse=request.new_requests == "refuse")
        return json_response(Done(message="nothing is computed until /continue_generation"))

    async def continue_generation(self) -> quart.Response:
        """``POST /continue_generation`` and ``POST /resume``."""
        await self._service.read_if_any(ContinueRequest)
        self._service.engine.resume()
        return json_response(Done(message="what waits is computed"))

    async def is_paused(self) -> quart.Response:
        """``GET /is_paused``."""
        return json_response(PauseReply(is_paused=self._service.engine.paused))

    async def abort_request(self) -> quart.Response:
        """``POST /abort_request``."""
        request = await self._service.read(AbortRequest)
        if request.abort_all:
            number = self._service.engine.abort("", prefix=True)
        else:
            # An empty name names nobody: everybody's end has to be asked for in so many words.
            number = self._abort([request.rid] if request.rid else [], prefix=True)
        return json_response(AbortReply(num_aborted=number))

    async def abort_requests(self) -> quart.Response:
        """``POST /abort_requests``."""
        request = await self._service.read(AbortManyRequest)
        number = self._abort(request.request_ids, prefix=False)
        return json_response(AbortReply(num_aborted=number))

    def _abort(self, ids: Iterable[str], *, prefix: bool) -> int:
        """End requests by what their client called them, or by what the answer calls them."""
        engine = self._service.engine
        return sum(
            engine.abort(kind + id, prefix=prefix) for id in ids for kind in ("", *ID_PREFIXES)
        )

    async def flush_cache(self) -> quart.Response:
        """``GET`` or ``POST /flush_cache``, and ``POST /reset_prefix_cache``."""
        if quart.request.method == "POST":
            await self._service.read_if_any(FlushRequest)
        return json_response(FlushReply(num_pages_freed=self._service.engine.flush_cache()))
