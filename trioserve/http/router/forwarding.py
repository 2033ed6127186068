"""Forwarding of a request to a server, and of the answer to the client as it comes.

Leaving it, for whatever reason, closes the connection to a server that hasn't ended its answer.
There that is the client's disconnect, so the request is aborted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import attrs
import httpcore2

from trioserve.http.api.errors import NoServer, ServerLost
from trioserve.http.router.request import ClientRequest, Headers, end_to_end
from trioserve.http.router.upstream import Upstream

MAX_WHOLE = 64 << 20
"""Largest answer with a known length that is read before it is sent on."""
_BY_ROUTER = frozenset({b"date", b"server"})
_LOST = (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException)


class Unreached(Exception):
    """A server gave no answer, and the client has got nothing: another one may be asked.

    Args:
        message: What happened.
        connected: False if there was no connection.
    """

    def __init__(self, message: str, *, connected: bool) -> None:
        super().__init__(message)
        self.connected = connected

    def as_error(self) -> NoServer:
        """Return the error for a client when no other server is left."""
        return NoServer(str(self))


@attrs.frozen
class WholeAnswer:
    """An answer that was read to its end."""

    status: int
    headers: Headers
    body: bytes


@attrs.frozen(kw_only=True)
class Forwarding:
    """One request on its way through ``upstream``.

    Args:
        upstream: The server.
        request: The request.
        connect_timeout: Seconds to connect.
    """

    upstream: Upstream
    request: ClientRequest
    connect_timeout: float

    async def whole(self, *more_headers: tuple[bytes, bytes]) -> WholeAnswer:
        """Return the answer to the request with ``more_headers``.

        Raises:
            Unreached: There is none.
        """
        with self._unreached():
            async with self._opened(more_headers) as response:
                return await _read(response)

    async def get(self, target: str) -> WholeAnswer:
        """Return the answer to a GET with the request's authorization.

        Raises:
            Unreached: There is none.
        """
        kept = (b"authorization", b"x-api-key")
        headers = [each for each in self.request.forwarded_headers() if each[0] in kept]
        with self._unreached():
            async with self.upstream.connections.stream(
                "GET",
                self._url(target.encode()),
                headers=[*headers, (b"host", self._authority())],
                extensions=self._extensions(),
            ) as response:
                return await _read(response)

    async def run(
        self,
        *,
        is_last: bool,
        on_answer: Callable[[], None],
        on_first: Callable[[bytes], None],
    ) -> None:
        """Send the request to the server, and its answer to the client.

        Args:
            is_last: True to send a 503 on, because no other server is left.
            on_answer: Called when the server's answer begins.
            on_first: Called with the first bytes of its body.

        Raises:
            Unreached: The server gave no answer; the client has got nothing.
            ServerLost: The server was lost before the end of its answer.
        """
        with self._unreached():
            async with self._opened() as response:
                on_answer()
                if response.status == 503 and not is_last:
                    raise Unreached("the server is unavailable", connected=True)
                if _length(response) is None:
                    await self._stream(response, on_first)
                    return
                whole = await _read(response)
        self.request.release()
        on_first(whole.body)
        await self.request.answer(whole.status, whole.headers, whole.body)

    async def _stream(
        self, response: httpcore2.Response, on_first: Callable[[bytes], None]
    ) -> None:
        request = self.request
        request.release()
        await request.start(response.status, _headers_of(response))
        is_first = True
        async with contextlib.aclosing(response.aiter_stream()) as parts:
            async for part in parts:
                if is_first:
                    on_first(part)
                    is_first = False
                await request.send(part)
        await request.send(b"", more=False)

    def _opened(
        self, more: tuple[tuple[bytes, bytes], ...] = ()
    ) -> contextlib.AbstractAsyncContextManager[httpcore2.Response]:
        request = self.request
        headers = [each for each in request.forwarded_headers() if each[0] != b"host"]
        return self.upstream.connections.stream(
            request.method,
            self._url(request.target),
            headers=[(b"host", self._authority()), *headers, *more],
            content=request.body,
            extensions=self._extensions(),
        )

    def _url(self, target: bytes) -> httpcore2.URL:
        origin = self.upstream.connections.origin
        return httpcore2.URL(
            scheme=origin.scheme, host=origin.host, port=origin.port, target=target
        )

    def _authority(self) -> bytes:
        return self.upstream.address.authority.encode()

    def _extensions(self) -> dict[str, object]:
        return {"timeout": {"connect": self.connect_timeout}}

    @contextlib.contextmanager
    def _unreached(self):  # type: ignore[no-untyped-def]
        """Turn a failure of the connection in the block into :exc:`Unreached` or ``ServerLost``."""
        url = self.upstream.url
        try:
            yield
        except _LOST as error:
            if self.request.status:
                raise ServerLost("the server was lost before the end of its answer") from error
            connected = not isinstance(error, (httpcore2.ConnectError, httpcore2.ConnectTimeout))
            why = "broke off" if connected else "can't be reached"
            raise Unreached(f"{url} {why}: {error}", connected=connected) from error


def _length(response: httpcore2.Response) -> int | None:
    """Return the length of the body that the head tells; None if it doesn't, or is too large."""
    value = dict(response.headers).get(b"content-length")
    length = int(value) if value is not None and value.isdigit() else None
    return length if length is not None and length <= MAX_WHOLE else None


async def _read(response: httpcore2.Response) -> WholeAnswer:
    body = await response.aread()
    return WholeAnswer(response.status, _headers_of(response), body)


def _headers_of(response: httpcore2.Response) -> Headers:
    """Return the headers of an answer for the client, without its length."""
    left_out = {*_BY_ROUTER, b"content-length"}
    return [each for each in end_to_end(response.headers) if each[0] not in left_out]
