"""Connections to a server, given by its URL."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

import attrs
import trio

Connect = Callable[[], Awaitable[trio.abc.Stream]]

_ENDINGS = ("/chat/completions", "/completions", "/models")


@attrs.frozen
class Address:
    """The address of an OpenAI-compatible server."""

    tls: bool
    host: str
    port: int
    base_path: str
    """Path before ``/completions``, such as ``/v1``."""

    @property
    def authority(self) -> str:
        """Value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        standard = self.port == (443 if self.tls else 80)
        return host if standard else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """URL of the address, without the path."""
        return f"http{'s' if self.tls else ''}://{self.authority}"

    def connect(self, context: ssl.SSLContext | None = None) -> Connect:
        """Return a function that connects to the address, with ``context`` for an https URL."""
        if self.tls:
            return over_tls(self.host, self.port, context or ssl.create_default_context())
        return _tcp(self.host, self.port)


def parse_url(url: str) -> Address:
    """Return the address in ``url``: ``http(s)://host[:port]``, with or without ``/v1``.

    Raises:
        ValueError: ``url`` isn't such a URL.
    """
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = None
    if host is None or parts.scheme not in ("http", "https") or parts.query or parts.fragment:
        raise ValueError(f"expected a URL such as http://127.0.0.1:8000, got {url!r}")
    path = parts.path.rstrip("/")
    for ending in _ENDINGS:
        path = path.removesuffix(ending)
    tls = parts.scheme == "https"
    return Address(tls, host, port or (443 if tls else 80), path or "/v1")


def over_tcp(base_url: str) -> Connect:
    """Return a function that connects to ``http://host:port``.

    Raises:
        ValueError: ``base_url`` isn't such an address.
    """
    parts = urlsplit(base_url)
    if parts.scheme != "http" or parts.hostname is None:
        raise ValueError(f"expected http://host:port, got {base_url!r}")
    return _tcp(parts.hostname, parts.port or 80)


def _tcp(host: str, port: int) -> Connect:
    async def connect() -> trio.abc.Stream:
        return await _open(host, port)

    return connect


def over_tls(host: str, port: int, context: ssl.SSLContext) -> Connect:
    """Return a function that connects by TLS. ``context`` decides if the certificate is checked."""

    async def connect() -> trio.abc.Stream:
        stream = trio.SSLStream(
            await _open(host, port), context, server_hostname=host, https_compatible=True
        )
        try:
            await stream.do_handshake()
        except BaseException:
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(stream)
            raise
        return stream

    return connect


async def _open(host: str, port: int) -> trio.SocketStream:
    stream = await trio.open_tcp_stream(host, port)
    stream.setsockopt(trio.socket.IPPROTO_TCP, trio.socket.TCP_NODELAY, 1)
    return stream


def tls_context(ca_file: Path | None = None, *, insecure: bool = False) -> ssl.SSLContext:
    """Return a TLS context that trusts the system's certificates, those of ``ca_file``, or any.

    Raises:
        OSError: The file can't be read.
        ssl.SSLError: The file holds no certificates.
    """
    context = ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def reason_of(error: BaseException) -> str:
    """Return the system's reason for a connection's failure."""
    while not str(error) and error.__cause__ is not None:
        error = error.__cause__  # trio's own error for TLS has no text.
    if isinstance(error, ssl.SSLError):
        return _tls_reason(error)
    inner: BaseException = error
    while isinstance(inner.__cause__, BaseExceptionGroup):
        inner = inner.__cause__.exceptions[0]
    text = str(error) or type(error).__name__
    if isinstance(inner, OSError) and inner is not error and inner.strerror:
        return f"{text}: {inner.strerror}"
    return text


def _tls_reason(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate isn't trusted: {error.verify_message} (--ca-file, --insecure)"
    return f"TLS failed: {error.reason.lower().replace('_', ' ') if error.reason else error}"
