"""One line per HTTP request: what was asked, how it ended, how long it took, what it used."""

from __future__ import annotations

import re
import uuid

import attrs
import trio

from trioserve.generation import Usage
from trioserve.http.errors import CLIENT_CLOSED_REQUEST
from trioserve.logs import get_logger
from trioserve.metrics import Metrics
from trioserve.stream import Chunk

__all__ = ["AccessRecord", "request_id_from"]

OTHER = "other"
"""The metrics' word for what isn't a route or a usual method; it keeps their number bounded."""

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})

_REQUEST_ID_PATTERN = re.compile(r"[\x21-\x7e]{1,128}")

_log = get_logger("trioserve.http")


def request_id_from(header: str | None) -> str:
    """The client's own request id if it is a fair one, else a new one."""
    if header is not None and _REQUEST_ID_PATTERN.fullmatch(header):
        return header
    return uuid.uuid4().hex


@attrs.define(eq=False, kw_only=True)
class AccessRecord:
    """What is known of one HTTP request; :meth:`write` makes the line of it.

    ``reason`` is the finish reason of a generation, or why the request ended early.
    """

    method: str
    path: str
    request_id: str
    started: float = attrs.field(factory=trio.current_time)
    route: str = OTHER
    status: int | None = None
    completed: bool = False
    disconnected: bool = False
    usage: Usage | None = None
    reason: str | None = None

    def note_chunk(self, chunk: Chunk) -> None:
        """Keep why a generation ended."""
        if chunk.finish_reason is not None:
            self.reason = chunk.finish_reason

    def note_usage(self, usage: Usage) -> None:
        """Keep the tokens used so far."""
        self.usage = usage

    def note_error(self, reason: str) -> None:
        """Keep why the request failed."""
        self.reason = reason

    def write(self, metrics: Metrics) -> None:
        """Log the line and count the response."""
        status = self.status or 500
        if not self.completed:
            status = CLIENT_CLOSED_REQUEST if self.disconnected else status
            self.reason = self.reason or (
                "client_disconnected" if self.disconnected else "server_closed"
            )
        method = self.method if self.method in _METHODS else OTHER
        metrics.observe_response(method, self.route, status)
        fields: dict[str, object] = {
            "method": self.method,
            "path": self.path,
            "status": status,
            "request_id": self.request_id,
            "duration_ms": round((trio.current_time() - self.started) * 1000, 1),
        }
        if self.usage is not None:
            fields["prompt_tokens"] = self.usage.prompt_tokens
            fields["completion_tokens"] = self.usage.completion_tokens
        if self.reason is not None:
            fields["reason"] = self.reason
        _log.info("request", **fields)
