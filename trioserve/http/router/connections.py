"""Connections to one server: each carries one request at a time, and is kept for the next one.

httpcore's own pool looks at all of its connections twice for each request, and asks the system
about each that is idle. Here a request costs the same beside a thousand others.
"""

from __future__ import annotations

import contextlib
import ssl
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import attrs
import httpcore2
import trio

KEPT = 60.0
"""Seconds that a connection is kept without a request."""
_CLOSE_TIMEOUT = 1.0


@attrs.define(eq=False)
class UpstreamConnections:
    """The connections to the server at ``origin``, with ``context`` for TLS."""

    origin: httpcore2.Origin
    context: ssl.SSLContext | None
    _idle: deque[httpcore2.AsyncHTTPConnection] = attrs.field(init=False, factory=deque)
    """Connections without a request, in the order in which they became idle."""

    @contextlib.asynccontextmanager
    async def stream(
        self, method: str, url: httpcore2.URL, **more: Any
    ) -> AsyncIterator[httpcore2.Response]:
        """Send a request, and yield its answer, whose body is to be read in the block.

        The connection is closed unless the whole answer was read. ``more`` is that of httpcore.
        """
        connection = await self._take()
        try:
            async with connection.stream(method, url, **more) as response:
                yield response
        finally:
            if connection.is_available():
                self._idle.append(connection)
            else:
                await _close(connection)

    async def _take(self) -> httpcore2.AsyncHTTPConnection:
        """Return the connection that was used last, or a new one; close those that have expired."""
        while self._idle and self._idle[0].has_expired():
            await _close(self._idle.popleft())
        while self._idle:
            connection = self._idle.pop()
            if not connection.has_expired():
                return connection
            await _close(connection)
        return httpcore2.AsyncHTTPConnection(self.origin, self.context, keepalive_expiry=KEPT)

    async def aclose(self) -> None:
        """Close the connections without a request."""
        while self._idle:
            await _close(self._idle.pop())


async def _close(connection: httpcore2.AsyncHTTPConnection) -> None:
    with trio.CancelScope(shield=True, deadline=trio.current_time() + _CLOSE_TIMEOUT):
        await connection.aclose()
