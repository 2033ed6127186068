"""Forms with a file, as browsers and curl send them (multipart/form-data)."""

from __future__ import annotations

import io
from typing import IO, TypeVar

import msgspec
from werkzeug.exceptions import RequestEntityTooLarge
from werkzeug.formparser import MultiPartParser

from trioserve.http.api.schema.ignored_fields import MAX_IGNORED, IgnoredFields
from trioserve.http.api.schema.reading import IGNORABLE, parse_query
from trioserve.protocol.errors import InvalidRequest

FORM_TYPE = "multipart/form-data"
FILE = "file"
"""Name of the field with the file, in every class of a form."""
MAX_PARTS = 64
MAX_FIELD_BYTES = 512 << 10
"""Most bytes of a field that is no file."""

FormType = TypeVar("FormType", bound=msgspec.Struct)


def parse_form(
    form_type: type[FormType], body: bytes, boundary: str, ignored: IgnoredFields | None = None
) -> FormType:
    """Return the form in ``body``.

    Args:
        form_type: Its class, which has the bytes of its file in the field ``file``.
        body: The bytes that were sent.
        boundary: What stands between its parts.
        ignored: Collects the names of unserved fields, if these are ignored.

    Raises:
        InvalidRequest: It isn't such a form; ``param`` names the field if there is one to name.
    """
    fields, data = _read(body, boundary)
    for _ in range(MAX_IGNORED):
        try:
            form = parse_query(form_type, [*fields, (FILE, "")])
        except InvalidRequest as error:
            if ignored is None or error.code not in IGNORABLE:
                raise
            ignored.note(str(error.param))
            others = [
                (name, value)
                for name, value in fields
                if error.param not in (name, name.removesuffix("[]"))
            ]
            if len(others) == len(fields):
                raise
            fields = others
        else:
            setattr(form, FILE, data)
            return form
    raise InvalidRequest(f"the form has more than {MAX_IGNORED} unserved fields")


def _read(body: bytes, boundary: str) -> tuple[list[tuple[str, str]], bytes]:
    """Return the fields of a form by name, and the content of its file."""
    parser = MultiPartParser(
        stream_factory=_in_memory,
        max_form_memory_size=MAX_FIELD_BYTES,
        max_form_parts=MAX_PARTS,
    )
    try:
        found, files = parser.parse(io.BytesIO(body), boundary.encode(), len(body))
    except RequestEntityTooLarge:
        raise InvalidRequest(
            f"a form may have {MAX_PARTS} parts, and {MAX_FIELD_BYTES} bytes in a field that is "
            "no file"
        ) from None
    except ValueError as error:
        raise InvalidRequest(f"the body isn't a valid form: {error}") from None
    fields = list(found.items(multi=True))
    if FILE in found:
        raise InvalidRequest(f"{FILE} must be sent as a file, with a filename", param=FILE)
    given = list(files.items(multi=True))
    for name, _ in given:
        if name != FILE:
            fields.append((name, ""))  # Refused like any other unknown field.
    uploaded = [each for name, each in given if name == FILE]
    if len(uploaded) != 1:
        raise InvalidRequest(f"give exactly one {FILE}, got {len(uploaded)}", param=FILE)
    return fields, uploaded[0].read()


def _in_memory(
    total_content_length: int | None,
    content_type: str | None,
    filename: str | None,
    content_length: int | None = None,
) -> IO[bytes]:
    """Return the memory for a file; it is a part of the body, whose size is bounded."""
    return io.BytesIO()
