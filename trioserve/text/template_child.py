"""The process that renders slow chat templates, with limited time and memory.

It reads MessagePack from standard input and writes it to standard output; each message follows its
length in four bytes. It reads a :class:`Setup`, then one :class:`RenderJob` after another, and
answers each with a :class:`Rendered`. A job past the limits ends the process. So does the end of
standard input, when the server is gone.
"""

from __future__ import annotations

import math
import os
import resource
import sys
from pathlib import Path
from typing import IO, Any

import msgspec

from trioserve.protocol.errors import InvalidRequest, ModelLoadError
from trioserve.text.chat_template import ChatTemplate

MAX_SECONDS = 2
"""Processor seconds for one conversation. Usual ones take less than a hundredth."""
MAX_MEMORY = 128 << 20
"""Bytes for one conversation, the templates' text and the answer included."""
NICENESS = 5
"""Nice value of the process, so that the server and the worker have priority."""
HEAD = 4
"""Size of the length in front of a message, in bytes."""


class Setup(msgspec.Struct, array_like=True, frozen=True):
    """The template of the jobs to come."""

    source: str
    tokens: dict[str, str]


class RenderJob(msgspec.Struct, array_like=True, frozen=True):
    """A :class:`~trioserve.text.chat_template.Conversation`."""

    messages: list[Any]
    template_arguments: dict[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool


class Rendered(msgspec.Struct, array_like=True, frozen=True):
    """The text of a job, or the error and the field of the request that caused it."""

    text: str = ""
    error: str = ""
    param: str | None = None


def framed(message: msgspec.Struct) -> bytes:
    """Return ``message`` as bytes with its length.

    Raises:
        TypeError, ValueError, OverflowError, RecursionError: MessagePack can't encode it.
    """
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(HEAD, "little") + body


def main() -> None:
    """Answer the jobs on standard input."""
    source, target = sys.stdin.buffer, sys.stdout.buffer
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + MAX_MEMORY)
    try:
        setup = msgspec.msgpack.decode(_read(source), type=Setup)
        template = ChatTemplate(setup.source, **setup.tokens)
        while True:
            job = msgspec.msgpack.decode(_read(source), type=RenderJob)
            used = resource.getrusage(resource.RUSAGE_SELF)
            _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + MAX_SECONDS))
            target.write(framed(_rendered(template, job)))
            target.flush()
    except (EOFError, MemoryError, ModelLoadError):
        os._exit(1)  # At once: there may be no memory for more.


def _rendered(template: ChatTemplate, job: RenderJob) -> Rendered:
    try:
        return Rendered(template.render(job))
    except InvalidRequest as error:
        return Rendered(error=str(error), param=error.param)


def _read(source: IO[bytes]) -> bytes:
    """Return the next message; raise EOFError if it is missing or incomplete."""
    head = source.read(HEAD)
    size = int.from_bytes(head, "little")
    body = source.read(size)
    if len(head) < HEAD or len(body) < size:
        raise EOFError
    return body


def _limit(kind: int, value: int) -> None:
    resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))
