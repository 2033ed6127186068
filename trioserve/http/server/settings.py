"""Settings of the protocols and connections: hypercorn's configuration and our own limits."""

from __future__ import annotations

import logging
import ssl

from hypercorn.config import Config
from hypercorn.logging import Logger

from trioserve.config import ServerConfig

MAX_HEAD_SIZE = 1 << 16
"""Bytes of a request's head; over HTTP/2 both as sent and as decoded."""
MAX_STREAMS = 128
"""Requests that may be open at a time on one HTTP/2 connection."""
MAX_FRAME_SIZE = 1 << 14
"""Bytes of one HTTP/2 frame; the value that HTTP/2 starts with."""


class ServerSettings(Config):
    """Hypercorn's configuration, and our limits. All times are in seconds."""

    send_timeout: float = 30.0
    """Time for which a client may leave our bytes unread."""
    request_timeout: float = 60.0
    """Time that a client has for a handshake, and again for the head of a request."""
    max_body_size: int = 32 << 20
    """Bytes of a body; a client that asks to send a larger one isn't told to go on."""
    max_unsent_bytes: int = 256 << 20
    """Bytes of answers that all clients together may leave unread."""
    tls: ssl.SSLContext | None = None
    """TLS context of connections, if they are encrypted."""


class _HypercornLog(Logger):
    """Hypercorn's messages in our log. The application logs requests."""

    def __init__(self, config: object) -> None:
        self.access_logger = None
        self.error_logger = logging.getLogger("trioserve.http")


def server_settings(config: ServerConfig, tls: ssl.SSLContext | None = None) -> ServerSettings:
    """Return the settings that follow from the server's options."""
    settings = ServerSettings()
    settings.logger_class = _HypercornLog
    settings.send_timeout = config.send_timeout
    settings.request_timeout = config.request_timeout
    settings.max_body_size = config.max_body_size
    # Each of several processes has an equal part.
    total = config.engine.max_total_stream_bytes
    settings.max_unsent_bytes = max(total // config.api_server_count, 1)
    settings.tls = tls
    settings.include_server_header = False
    settings.keep_alive_timeout = (
        75  # More than the 60 s after which proxies drop an idle connection.
    )
    settings.keep_alive_max_requests = 100_000
    settings.h11_max_incomplete_size = MAX_HEAD_SIZE
    settings.h2_max_concurrent_streams = MAX_STREAMS
    settings.h2_max_header_list_size = MAX_HEAD_SIZE
    settings.h2_max_inbound_frame_size = MAX_FRAME_SIZE
    return settings
