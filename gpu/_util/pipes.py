"""Messages through the pipes of a child process: MessagePack with a length of four bytes before."""

from __future__ import annotations

from typing import IO, Any

import msgspec


def write_message(target: IO[bytes], message: Any) -> None:
    """Write ``message``, and flush it.

    Raises:
        BrokenPipeError: The reader has ended.
    """
    body = msgspec.msgpack.encode(message)
    target.write(len(body).to_bytes(4, "little"))
    target.write(body)
    target.flush()


def read_message(source: IO[bytes]) -> Any:
    """Return the next message.

    Raises:
        EOFError: The input ends before or within it.
    """
    head = source.read(4)
    size = int.from_bytes(head, "little")
    body = source.read(size)
    if len(head) < 4 or len(body) < size:
        raise EOFError
    return msgspec.msgpack.decode(body)
