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
"""By the status; others are the client's or the server's."""


class MessagesErrorDetail(msgspec.Struct):
    """What went wrong, in Anthropic's words."""

    type: Annotated[str, msgspec.Meta(description="What kind of error it is.")]
    message: Annotated[str, msgspec.Meta(description="What is wrong, for people.")]


class MessagesError(ErrorBody, tag_field="type", tag="error"):
    """The body of an error of ``/v1/messages``."""

    error: Annotated[MessagesErrorDetail, msgspec.Meta(description="What went wrong.")]

    @classmethod
    def of(cls, status: int, detail: ErrorDetail) -> Self:
        """The body that says ``detail``."""
        usual = "invalid_request_error" if status < 500 else "api_error"
        return cls(MessagesErrorDetail(_TYPES.get(status, usual), detail.message))
