"""Errors in Ollama's form."""

from __future__ import annotations

from typing import Annotated, Self

import msgspec

from trioserve.http.server.error_body import ErrorBody, ErrorDetail


class OllamaError(ErrorBody):
    """The body of an error below ``/api/``."""

    error: Annotated[str, msgspec.Meta(description="The error, in words for a person.")]

    @classmethod
    def of(cls, status: int, detail: ErrorDetail) -> Self:
        """Return the body that carries ``detail``."""
        return cls(detail.message)
