"""Messages through the pipes of a child process."""

from __future__ import annotations

from typing import IO, Any

import msgspec

from trioserve.protocol.frames import framed, read_frame


def write_message(target: IO[bytes], message: Any) -> None:
    """Write ``message``, and flush it.

    Raises:
        BrokenPipeError: The reader has ended.
    """
    target.write(framed(message))
    target.flush()


def read_message(source: IO[bytes]) -> Any:
    """Return the next message.

    Raises:
        EOFError: The input ends before or within it.
    """
    return msgspec.msgpack.decode(read_frame(source))
