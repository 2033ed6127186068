"""Whose clients ask at a path: they know errors and headers of another form than OpenAI's."""

from __future__ import annotations

from trioserve.http.api.anthropic.errors import MessagesError
from trioserve.http.api.ollama.errors import OllamaError
from trioserve.http.server.error_body import ErrorBody, ErrorResponse

_BODIES: tuple[tuple[str, type[ErrorBody]], ...] = (
    ("/v1/messages", MessagesError),
    ("/api/", OllamaError),
)
"""By what paths begin with."""


def error_body(path: str) -> type[ErrorBody]:
    """The form of errors at ``path``, whether anything is served there or not."""
    return next((body for start, body in _BODIES if path.startswith(start)), ErrorResponse)


def id_headers(path: str) -> tuple[str, ...]:
    """The headers that tell a request's id in the answer at ``path``."""
    if error_body(path) is MessagesError:
        return ("X-Request-Id", "Request-Id")
    return ("X-Request-Id",)
