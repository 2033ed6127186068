"""Fetching of media from http and https URLs, of hosts that the operator names.

A name is resolved once, its addresses are checked, and the connection goes to a checked address:
an answer of the DNS that changes can't lead elsewhere. The certificate has to be the name's.
Redirects aren't followed, and no proxy is used.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from urllib.parse import urlsplit

import attrs
import httpcore2
import trio

from trioserve.protocol.addresses import host_and_port
from trioserve.protocol.errors import InvalidRequest
from trioserve.requests.media.public_addresses import is_public
from trioserve.requests.media.sources import too_many_bytes

FETCH_SECONDS = 10.0
"""Longest time for one URL, from its name's resolution to the last byte."""
MAX_URL_CHARACTERS = 8192
MAX_ADDRESSES = 3
"""Most addresses of a host that are tried."""
_PORTS = {"http": 80, "https": 443}
_CLOSE_TIMEOUT = 1.0

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the addresses of a host's name, as texts; raises OSError if there are none."""


@attrs.frozen
class MediaUrl:
    """A URL that may be fetched.

    Attributes:
        scheme: ``http`` or ``https``.
        host: Host in small letters, without a final dot.
        port: Port.
        target: Path and query.
    """

    scheme: str
    host: str
    port: int
    target: str

    @property
    def authority(self) -> str:
        """Value of the Host header."""
        if self.port == _PORTS[self.scheme]:
            return self.host
        return host_and_port(self.host, self.port)

    @classmethod
    def parse(cls, text: str) -> MediaUrl:
        """Return the URL in ``text``; its fragment is left out.

        Raises:
            ValueError: It isn't a URL of http or https, or has a user's name, or characters that
                have to be escaped.
        """
        if len(text) > MAX_URL_CHARACTERS:
            raise ValueError(f"it has more than {MAX_URL_CHARACTERS} characters")
        if not text.isascii() or not text.isprintable() or any(each in text for each in ' \\"<>'):
            raise ValueError("it has characters that have to be escaped")
        parts = urlsplit(text)
        port = parts.port  # raises ValueError
        if parts.scheme not in _PORTS or not parts.hostname:
            raise ValueError("it must begin with http:// or https:// and a host")
        if "@" in parts.netloc:
            raise ValueError("it must have no user's name")
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        host = parts.hostname.lower().removesuffix(".")
        return cls(parts.scheme, host, _PORTS[parts.scheme] if port is None else port, target)


async def resolve(host: str, port: int) -> Sequence[str]:
    """Return the addresses of ``host`` that the system's resolver knows.

    Raises:
        OSError: There are none.
    """
    found = await trio.socket.getaddrinfo(host, port, type=trio.socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class MediaFetcher:
    """Client that fetches media from named hosts.

    Args:
        hosts: Hosts whose URLs are fetched (``--allowed-media-domains``).
        max_bytes: Most bytes of a file (``--limit-mm-bytes``).
        resolve: Resolves names.
        allowed: Says whether an address may be connected to.
        context: TLS context; None for one that trusts the system's certificates.
    """

    def __init__(
        self,
        hosts: Iterable[str],
        max_bytes: int,
        *,
        resolve: Resolve = resolve,
        allowed: Callable[[str], bool] = is_public,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._hosts = frozenset(host.lower().removesuffix(".") for host in hosts)
        self._max_bytes = max_bytes
        self._resolve = resolve
        self._allowed = allowed
        self._context = context

    async def fetch(self, text: str, kind: str, name: str) -> bytes:
        """Return the content of a URL.

        Args:
            text: The URL.
            kind: Kind of the part.
            name: Name of the part in errors.

        Raises:
            InvalidRequest: It may not be fetched, can't be, takes too long, or has too many bytes.
        """
        try:
            url = MediaUrl.parse(text)
        except ValueError as error:
            raise _refuse(name, f"the URL isn't valid: {error}") from error
        if url.host not in self._hosts:
            raise _refuse(
                name, f"URLs of {url.host} aren't fetched: --allowed-media-domains names the hosts"
            )
        try:
            with trio.fail_after(FETCH_SECONDS):
                return await self._fetch(url, kind, name)
        except trio.TooSlowError:
            raise _refuse(name, f"{url.host} takes more than {FETCH_SECONDS:g} s") from None
        except (
            httpcore2.NetworkError,
            httpcore2.ProtocolError,
            httpcore2.TimeoutException,
        ) as error:
            raise _refuse(name, f"{url.host} can't be fetched from: {error}") from error

    async def _fetch(self, url: MediaUrl, kind: str, name: str) -> bytes:
        addresses = await self._checked_addresses(url, name)
        if url.scheme == "https" and self._context is None:
            # Reading the system's certificates takes tens of milliseconds.
            self._context = await trio.to_thread.run_sync(ssl.create_default_context)
        for address in addresses[:-1]:
            with contextlib.suppress(httpcore2.ConnectError):
                return await self._fetch_from(address, url, kind, name)
        return await self._fetch_from(addresses[-1], url, kind, name)

    async def _fetch_from(self, address: str, url: MediaUrl, kind: str, name: str) -> bytes:
        """Return the content that the server at ``address`` has, if it is the host by its name."""
        origin = httpcore2.Origin(url.scheme.encode(), address.encode(), url.port)
        connection = httpcore2.AsyncHTTPConnection(origin, self._context)
        target = httpcore2.URL(
            scheme=origin.scheme, host=origin.host, port=url.port, target=url.target.encode()
        )
        headers: dict[bytes | str, bytes | str] = {
            "Host": url.authority,
            "Accept": f"{kind}/*",
            "Accept-Encoding": "identity",
            "Connection": "close",
        }
        try:
            async with connection.stream(
                "GET", target, headers=headers, extensions={"sni_hostname": url.host}
            ) as response:
                self._check_head(response, url, kind, name)
                return await self._body(response, kind, name)
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + _CLOSE_TIMEOUT):
                await connection.aclose()

    async def _checked_addresses(self, url: MediaUrl, name: str) -> list[str]:
        """Return the addresses of the host, all of which may be connected to."""
        try:
            addresses = await self._resolve(url.host, url.port)
        except (OSError, UnicodeError) as error:
            raise _refuse(name, f"{url.host} can't be resolved") from error
        # One that isn't allowed among others is no oversight of its owner.
        if not addresses or not all(map(self._allowed, addresses)):
            raise _refuse(name, f"{url.host} has no public address")
        return list(addresses[:MAX_ADDRESSES])

    def _check_head(
        self, response: httpcore2.Response, url: MediaUrl, kind: str, name: str
    ) -> None:
        headers = {key.lower(): value for key, value in response.headers}
        if 300 <= response.status < 400:
            raise _refuse(name, f"{url.host} redirects to another URL, which isn't followed")
        if response.status != 200:
            raise _refuse(name, f"{url.host} answers with the status {response.status}")
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise _refuse(name, f"{url.host} sends a compressed answer")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self._max_bytes:
            raise too_many_bytes(name, kind, length[:20].decode(), self._max_bytes)

    async def _body(self, response: httpcore2.Response, kind: str, name: str) -> bytes:
        pieces: list[bytes] = []
        size = 0
        async for piece in response.aiter_stream():
            size += len(piece)
            if size > self._max_bytes:
                raise too_many_bytes(name, kind, f"at least {size}", self._max_bytes)
            pieces.append(piece)
        return b"".join(pieces)


def _refuse(name: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{name}: {reason}", param=name)
