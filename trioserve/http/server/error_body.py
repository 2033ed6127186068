"""Bodies of the errors that the server answers without the application.

The form is OpenAI's; other APIs derive theirs.
"""

from __future__ import annotations

from typing import Annotated, Self

import msgspec


class ErrorDetail(msgspec.Struct, kw_only=True):
    """Description of an error."""

    message: Annotated[str, msgspec.Meta(description="The error, in words for a person.")]
    type: Annotated[str, msgspec.Meta(description="The kind of error.")]
    param: Annotated[str | None, msgspec.Meta(description="The field, as the client wrote it.")] = (
        None
    )
    code: Annotated[str | None, msgspec.Meta(description="The error's code, for programs.")] = None


class ErrorBody(msgspec.Struct):
    """Base of the bodies of errors; each API's form is a subclass."""

    @classmethod
    def of(cls, status: int, detail: ErrorDetail) -> Self:
        """Return the body that carries ``detail``."""
        raise NotImplementedError


class ErrorResponse(ErrorBody):
    """OpenAI's body of an error."""

    error: Annotated[ErrorDetail, msgspec.Meta(description="The error.")]

    @classmethod
    def of(cls, status: int, detail: ErrorDetail) -> Self:
        """Return the body that carries ``detail``."""
        return cls(detail)
