"""The process in which chat templates are rendered that may take long: time and memory are limited.

It reads from standard input and writes to standard output, MessagePack behind its length of four
bytes: first a :class:`Setup`, then one :class:`RenderJob` after another, each answered by a
:class:`Rendered`. A job that takes too much ends the process. It ends as well when its standard
input does, which is when the server is gone.
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
"""Processor time for one conversation. Usual ones take less than a hundredth of that."""
MAX_MEMORY = 128 << 20
"""Bytes for one conversation, the templates' text and the answer included."""
NICENESS = 5
"""How much the server's own process and the worker go before."""
HEAD = 4
"""Bytes of a message's length."""


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
    """The text of a job, or why there is none, and which field of the request is to blame."""

    text: str = ""
    error: str = ""
    param: str | None = None


def framed(message: msgspec.Struct) -> bytes:
    """Return ``message`` as it is sent.

    Raises:
        TypeError, ValueError, OverflowError, RecursionError: it holds what MessagePack can't.
    """
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(HEAD, "little") + body


def main() -> None:
    """Answer what comes on standard input."""
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
        os._exit(1)  # At once, as there may be no memory for anything else.


def _rendered(template: ChatTemplate, job: RenderJob) -> Rendered:
    try:
        return Rendered(template.render(job))
    except InvalidRequest as error:
        return Rendered(error=str(error), param=error.param)


def _read(source: IO[bytes]) -> bytes:
    """Return the next message; raise EOFError if there is none, or not all of it."""
    head = source.read(HEAD)
    size = int.from_bytes(head, "little")
    body = source.read(size)
    if len(head) < HEAD or len(body) < size:
        raise EOFError
    return body


def _limit(kind: int, value: int) -> None:
    resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))
