"""The bytes of a part, on their way to a child process, and their bounds.

Nothing is decoded here, and no text is copied as a whole: base64 may have many megabytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import attrs

from trioserve.protocol.errors import InvalidRequest
from trioserve.requests.media.messages import Encoding
from trioserve.requests.media.parts import DATA_BEGINNING, DecodedAudio, Pixels, Source

MAX_HEADER_CHARACTERS = 256
"""Longest beginning of a data URL, up to its comma."""
CHUNK = 1 << 18
"""Characters that are encoded at once."""


@attrs.frozen
class Payload:
    """Bytes for a child process, and the form that they have."""

    encoding: Encoding
    data: bytes | str = attrs.field(repr=False)
    start: int = 0
    """Place in ``data`` at which they begin."""
    pixels: Pixels | None = attrs.field(default=None, repr=False)
    """Decoded image, whose data they are."""

    @property
    def size(self) -> int:
        """Number of bytes."""
        return len(self.data) - self.start

    def pieces(self) -> Iterator[bytes | memoryview]:
        """Yield the bytes in pieces. A character that isn't ASCII becomes a question mark."""
        if isinstance(self.data, bytes):
            yield memoryview(self.data)[self.start :]
            return
        for place in range(self.start, len(self.data), CHUNK):
            yield self.data[place : place + CHUNK].encode("ascii", "replace")


def payload_of(source: Source, kind: str, name: str, max_bytes: int) -> Payload:
    """Return the payload of a source that isn't fetched.

    Args:
        source: Bytes, a path, base64, a data URL, pixels or samples.
        kind: Kind of the part.
        name: Name of the part in errors.
        max_bytes: Most bytes before they are decoded (``--limit-mm-bytes``). What is decoded has
            other limits.

    Raises:
        InvalidRequest: There are more bytes, or the data URL isn't valid.
    """
    if isinstance(source, Pixels):
        return Payload("pixels", source.data, pixels=source)
    if isinstance(source, DecodedAudio):
        return Payload("samples", source.data)
    if isinstance(source, Path):
        return Payload("path", os.fsencode(source))
    if isinstance(source, bytes):
        payload, size = Payload("bytes", source), len(source)
    else:
        payload = Payload("base64", source, _start_of_base64(source, kind, name))
        size = payload.size // 4 * 3
        size -= source[-2:].count("=")
    if size > max_bytes:
        raise too_many_bytes(name, kind, f"{size}", max_bytes)
    return payload


def too_many_bytes(name: str, kind: str, size: str, max_bytes: int) -> InvalidRequest:
    """Return the error for a part of too many bytes; ``size`` is their number, in words."""
    return InvalidRequest(
        f"{name}: the {kind} has {size} bytes, more than --limit-mm-bytes ({max_bytes}) allows",
        param=name,
    )


def _start_of_base64(text: str, kind: str, name: str) -> int:
    if text[: len(DATA_BEGINNING)].lower() != DATA_BEGINNING:
        return 0
    end = text.find(",", 0, MAX_HEADER_CHARACTERS)
    header = text[len(DATA_BEGINNING) : max(end, 0)].lower()
    if end < 0 or not header.endswith(";base64"):
        raise InvalidRequest(
            f"{name}: a data URL must have the form data:{kind}/…;base64,…", param=name
        )
    media_type = header.partition(";")[0]
    if media_type not in ("", "application/octet-stream") and not media_type.startswith(f"{kind}/"):
        raise InvalidRequest(
            f"{name}: the data URL has the type {media_type!r}, which is no {kind}", param=name
        )
    return end + 1
