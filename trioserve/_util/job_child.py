"""The child's side of :mod:`~trioserve._util.job_processes`: messages and limits.

Messages are MessagePack over the standard streams; each follows its length in four bytes.
"""

from __future__ import annotations

import math
import os
import resource
from pathlib import Path
from typing import IO

import msgspec

NICENESS = 5
"""Nice value of the process, so that the server and the worker have priority."""
HEAD = 4
"""Size of the length in front of a message, in bytes."""


def framed(message: msgspec.Struct) -> bytes:
    """Return ``message`` as bytes with its length.

    Raises:
        TypeError, ValueError, OverflowError, RecursionError: MessagePack can't encode it.
    """
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(HEAD, "little") + body


def read_message(source: IO[bytes]) -> bytes:
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


def lower_priority() -> None:
    """Let the server and the worker go first, and leave no core dump."""
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_memory(more: int) -> None:
    """Let the process map at most ``more`` bytes beyond what it has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + more)


def limit_processor_time(more: float) -> None:
    """End the process after ``more`` seconds of processor time from now, rounded up."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + more))


def _limit(kind: int, value: int) -> None:
    resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))
