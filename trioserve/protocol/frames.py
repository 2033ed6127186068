"""Messages over pipes: MessagePack, each behind its length in four bytes."""

from __future__ import annotations

from typing import IO, Any

import msgspec

HEAD = 4
"""Size of the length in front of a message, in bytes."""


def framed(message: Any) -> bytes:
    """Return ``message`` as bytes with its length.

    Raises:
        TypeError, ValueError, OverflowError, RecursionError: MessagePack can't encode it.
    """
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(HEAD, "little") + body


def read_frame(source: IO[bytes]) -> bytes:
    """Return the next message, without its length.

    Raises:
        EOFError: It is missing or incomplete.
    """
    return read_bytes(source, int.from_bytes(read_bytes(source, HEAD), "little"))


def read_bytes(source: IO[bytes], size: int) -> bytes:
    """Return the next ``size`` bytes.

    Raises:
        EOFError: There are fewer.
    """
    received = source.read(size)
    if len(received) < size:
        raise EOFError
    return received
