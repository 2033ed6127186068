"""The API of a path, which decides the form of errors and the names of id headers."""

from __future__ import annotations

from trioserve.http.api.anthropic.errors import MessagesError
from trioserve.http.api.ollama.errors import OllamaError
from trioserve.http.server.error_body import ErrorBody, ErrorResponse

_BODIES: tuple[tuple[str, type[ErrorBody]], ...] = (
    ("/v1/messages", MessagesError),
    ("/api/", OllamaError),
)
"""Classes of error bodies, by prefixes of paths."""


def error_body(path: str) -> type[ErrorBody]:
    """Return the class of error bodies at ``path``, whether it is served or not."""
    return next((body for start, body in _BODIES if path.startswith(start)), ErrorResponse)


def id_headers(path: str) -> tuple[str, ...]:
    """Return the headers that carry the request's id in an answer at ``path``."""
    if error_body(path) is MessagesError:
        return ("X-Request-Id", "Request-Id")
    return ("X-Request-Id",)
