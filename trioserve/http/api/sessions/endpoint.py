"""Handlers of ``/open_session`` and ``/close_session``. A session belongs to the key that opened
it.
"""

from __future__ import annotations

import quart

from trioserve.engine.sessions.session import MAX_CAPACITY
from trioserve.http.api.control.schemas import Done
from trioserve.http.api.generations import renamed
from trioserve.http.api.service import Service, json_response
from trioserve.http.api.sessions.schemas import (
    DEFAULT_TIMEOUT,
    CloseSessionRequest,
    OpenSessionRequest,
)
from trioserve.protocol.errors import InvalidRequest


class SessionEndpoints:
    """The handlers, over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def open_session(self) -> quart.Response:
        """Handle ``POST /open_session``: return the session's id, as a JSON string."""
        request = await self._service.read(OpenSessionRequest)
        try:
            id = await self._service.server_api.open_session(
                request.session_id,
                capacity=min(request.capacity_of_str_len, MAX_CAPACITY),
                timeout=request.timeout or DEFAULT_TIMEOUT,
                owner=self._service.record.key,
                tenant=self._service.record.tenant,
                goes_on=bool(request.streaming),
            )
        except InvalidRequest as error:
            raise renamed(error, {"capacity": "capacity_of_str_len"}) from None
        return json_response(id)

    async def close_session(self) -> quart.Response:
        """Handle ``POST /close_session``: running turns are ended."""
        request = await self._service.read(CloseSessionRequest)
        await self._service.server_api.close_session(request.session_id, self._service.record.key)
        return json_response(Done(message="the session is closed"))
