"""The process that renders slow chat templates, with limited time and memory.

It reads a :class:`Setup`, then one :class:`RenderJob` after another, and answers each with a
:class:`Rendered`. A job past the limits ends the process. So does the end of standard input, when
the server is gone.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec

from trioserve._util.job_child import (
    go_behind,
    limit_memory,
    limit_processor_time,
)
from trioserve.protocol.errors import InvalidRequest, ModelLoadError
from trioserve.protocol.frames import framed, read_frame
from trioserve.text.chat_template import ChatTemplate

NICENESS = 5
"""Niceness of the process, so that the server and the worker have priority."""
MAX_SECONDS = 2
"""Processor seconds for one conversation. Usual ones take less than a hundredth."""
MAX_MEMORY = 128 << 20
"""Bytes for one conversation, the templates' text and the answer included."""


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


def main() -> None:
    """Answer the jobs on standard input."""
    source, target = sys.stdin.buffer, sys.stdout.buffer
    go_behind(NICENESS)
    limit_memory(MAX_MEMORY)
    try:
        setup = msgspec.msgpack.decode(read_frame(source), type=Setup)
        template = ChatTemplate(setup.source, **setup.tokens)
        while True:
            job = msgspec.msgpack.decode(read_frame(source), type=RenderJob)
            limit_processor_time(MAX_SECONDS)
            target.write(framed(_rendered(template, job)))
            target.flush()
    except (EOFError, MemoryError, ModelLoadError):
        os._exit(1)  # At once: there may be no memory for more.


def _rendered(template: ChatTemplate, job: RenderJob) -> Rendered:
    try:
        return Rendered(template.render(job))
    except InvalidRequest as error:
        return Rendered(error=str(error), param=error.param)
