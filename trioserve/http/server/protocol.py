"""Choice of a connection's protocol: HTTP/1.1, or HTTP/2 by TLS's choice or its first bytes.

Hypercorn's version is pinned, because these classes use its internal ones.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import h11
from hypercorn.events import Event, RawData
from hypercorn.protocol.h11 import H2ProtocolAssumedError
from hypercorn.typing import AppWrapper, ConnectionState, TaskGroup, WorkerContext

from trioserve.http.server.fast_path import ByteOutput
from trioserve.http.server.http1 import HTTP1
from trioserve.http.server.http2 import HTTP2
from trioserve.http.server.settings import ServerSettings
from trioserve.http.server.unsent import UnsentBudget


class Protocol:
    """Wrapper that passes events to the protocol in use."""

    def __init__(
        self,
        app: AppWrapper,
        settings: ServerSettings,
        context: WorkerContext,
        tasks: TaskGroup,
        state: ConnectionState,
        client: tuple[str, int] | None,
        server: tuple[str, int] | None,
        do: Callable[[Event], Awaitable[None]],
        output: ByteOutput,
        budget: UnsentBudget,
        *,
        alpn: str | None,
    ) -> None:
        self._arguments = (
            *(app, settings, context, tasks, state, settings.tls is not None),
            *(client, server, do),
        )
        self._output = output
        self._budget = budget
        self.protocol: HTTP1 | HTTP2 = (
            self._http2() if alpn == "h2" else HTTP1(*self._arguments, output=output)
        )

    def _http2(self) -> HTTP2:
        return HTTP2(*self._arguments, output=self._output, budget=self._budget)

    async def initiate(self) -> None:
        """Send the server's first bytes."""
        await self.protocol.initiate()

    async def handle(self, event: Event) -> None:
        """Handle received bytes, or the end of the connection."""
        try:
            await self.protocol.handle(event)
        except H2ProtocolAssumedError as error:
            self.protocol = self._http2()
            await self.protocol.initiate()
            await self.protocol.handle(RawData(error.data))

    async def end(self, *, timed_out: bool) -> None:
        """Send the goodbye: reading stops, and no request is being served."""
        await self.protocol.end(timed_out=timed_out)

    def drop_unsent(self) -> None:
        """Drop the bytes that can't be sent any more. The connection's tasks have ended."""
        if isinstance(self.protocol, HTTP2):
            self.protocol.drop_unsent()

    @property
    def client_has_finished(self) -> bool:
        """Return whether the client has nothing more to send until it is answered."""
        protocol = self.protocol
        return isinstance(protocol, HTTP1) and protocol.connection.their_state in (
            *(h11.DONE, h11.MUST_CLOSE, h11.CLOSED),
        )
