"""Whose clients ask at a path: they know errors and headers of another form than OpenAI's."""

from __future__ import annotations

from trioserve.http.errors import ErrorBody, ErrorResponse
from trioserve.http.messages.errors import MessagesError
from trioserve.http.ollama.errors import OllamaError

__all__ = ["error_body", "id_headers"]

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
