"""Errors in Anthropic's form."""

from __future__ import annotations

from typing import Annotated, Self

import msgspec

from trioserve.http.server.error_body import ErrorBody, ErrorDetail

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Types by status; others are the client's or the server's errors."""


class MessagesErrorDetail(msgspec.Struct):
    """Description of an error, in Anthropic's form."""

    type: Annotated[str, msgspec.Meta(description="The kind of error.")]
    message: Annotated[str, msgspec.Meta(description="The error, in words for a person.")]


class MessagesError(ErrorBody, tag_field="type", tag="error"):
    """The body of an error of ``/v1/messages``."""

    error: Annotated[MessagesErrorDetail, msgspec.Meta(description="The error.")]

    @classmethod
    def of(cls, status: int, detail: ErrorDetail) -> Self:
        """Return the body that carries ``detail``."""
        usual = "invalid_request_error" if status < 500 else "api_error"
        return cls(MessagesErrorDetail(_TYPES.get(status, usual), detail.message))
