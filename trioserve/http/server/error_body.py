"""Bodies of errors, which the server answers by itself where no application can.

The form is OpenAI's; other APIs derive theirs.
"""

from __future__ import annotations

from typing import Annotated, Self

import msgspec


class ErrorDetail(msgspec.Struct, kw_only=True):
    """What went wrong."""

    message: Annotated[str, msgspec.Meta(description="What is wrong, for people.")]
    type: Annotated[str, msgspec.Meta(description="What kind of error it is.")]
    param: Annotated[str | None, msgspec.Meta(description="The field, as the client wrote it.")] = (
        None
    )
    code: Annotated[str | None, msgspec.Meta(description="What is wrong, for programs.")] = None


class ErrorBody(msgspec.Struct):
    """The body of an error; each form of it is a class of its own."""

    @classmethod
    def of(cls, status: int, detail: ErrorDetail) -> Self:
        """The body that says ``detail``."""
        raise NotImplementedError


class ErrorResponse(ErrorBody):
    """The body of an error."""

    error: Annotated[ErrorDetail, msgspec.Meta(description="What went wrong.")]

    @classmethod
    def of(cls, status: int, detail: ErrorDetail) -> Self:
        """The body that says ``detail``."""
        return cls(detail)
