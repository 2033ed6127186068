"""Processes that render slow chat templates, and the task that owns them.

A process is started on demand and renders one conversation after another. One that died or took too
long is replaced. :mod:`~trioserve.text.template_child` is its program.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import trio

from trioserve._util.child_process import end_child
from trioserve.observability.logs import get_logger
from trioserve.protocol.errors import EngineError, InvalidRequest
from trioserve.text.chat_template import ChatTemplate, ConversationFields
from trioserve.text.template_child import (
    HEAD,
    MAX_MEMORY,
    MAX_SECONDS,
    Rendered,
    RenderJob,
    Setup,
    framed,
)

MAX_PROCESSES = 2
MAX_WAIT = 60.0
"""Seconds to wait for an answer; long, for a busy machine."""
CHUNK = 1 << 20

_ROOT = Path(__file__).resolve().parents[2]
# The child imports the package from the same place, whatever the environment says.
_PROGRAM = (
    f"import sys; sys.path.insert(0, {str(_ROOT)!r}); "
    "from trioserve.text.template_child import main; main()"
)
_log = get_logger("trioserve.text")


class _Child:
    """A process that renders one template."""

    def __init__(self, process: trio.Process, template: ChatTemplate) -> None:
        self.template = template
        """Source of the template."""
        self._process = process
        self._unsent = framed(Setup(template.source, template.tokens))

    @classmethod
    async def start(cls, template: ChatTemplate) -> _Child:
        """Start a process.

        Raises:
            OSError: The process can't be started.
        """
        process = await trio.lowlevel.open_process(
            [sys.executable, "-P", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return cls(process, template)

    async def answer(self, frame: bytes) -> Rendered:
        """Return the process's answer to a job.

        Raises:
            EOFError: The process has died.
            trio.BrokenResourceError: The process died before it read the job.
            trio.TooSlowError: No answer came in time.
        """
        assert self._process.stdin is not None
        frame, self._unsent = self._unsent + frame, b""
        with trio.fail_after(MAX_WAIT):
            await self._process.stdin.send_all(frame)
            size = int.from_bytes(await self._receive(HEAD), "little")
            if size > MAX_MEMORY:
                raise EOFError
            return msgspec.msgpack.decode(await self._receive(size), type=Rendered)

    async def end(self) -> None:
        """Kill the process and wait until it has ended."""
        with trio.CancelScope(shield=True):
            await end_child(self._process, _log, "process that renders chat templates")
            assert self._process.stdout is not None
            await self._process.stdout.aclose()

    async def _receive(self, size: int) -> bytearray:
        assert self._process.stdout is not None
        received = bytearray()
        while len(received) < size:
            chunk = await self._process.stdout.receive_some(min(size - len(received), CHUNK))
            if not chunk:
                raise EOFError
            received += chunk
        return received


class TemplateProcesses:
    """A few rendering processes, owned by the task :meth:`run`."""

    def __init__(self) -> None:
        self._turns = trio.CapacityLimiter(MAX_PROCESSES)
        self._idle: list[_Child] = []
        self._all: set[_Child] = set()
        self._is_open = False

    async def run(self) -> None:
        """Allow :meth:`render` to start processes until cancelled; then end all of them."""
        self._is_open = True
        try:
            await trio.sleep_forever()
        finally:
            self._is_open = False
            with trio.CancelScope(shield=True):
                async with trio.open_nursery() as nursery:
                    for child in self._all:
                        nursery.start_soon(child.end)

    async def render(self, template: ChatTemplate, prompt: ConversationFields) -> str:
        """Return ``template`` rendered with ``prompt``. Cancelling ends the process.

        Raises:
            InvalidRequest: The template refuses the prompt, or takes too long or too much memory.
            EngineError: The task isn't running.
        """
        try:
            job = RenderJob(
                list(prompt.messages),
                dict(prompt.template_arguments),
                prompt.add_generation_prompt,
                prompt.continue_final_message,
            )
            frame = framed(job)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise _refuse(f"the messages can't be rendered: {error}") from error
        async with self._turns, self._child(template) as child:
            answer = await child.answer(frame)
        if answer.error:
            raise InvalidRequest(answer.error, param=answer.param)
        return answer.text

    @contextlib.asynccontextmanager
    async def _child(self, template: ChatTemplate) -> AsyncIterator[_Child]:
        """Yield a process for one job. It is reused, unless the block fails.

        Raises:
            InvalidRequest: The process died or didn't answer.
            EngineError: No process can be started.
        """
        child = await self._take(template)
        is_usable = False
        try:
            yield child
            is_usable = True
        except (EOFError, trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
            if not self._is_open:
                raise EngineError("the engine is closed") from None
            reason = f"more than {MAX_SECONDS} s or {MAX_MEMORY >> 20} MiB"
            _log.warning("a chat template was stopped", reason=f"it took {reason}")
            raise _refuse(f"the chat template takes {reason} to print the messages") from None
        finally:
            if is_usable and self._is_open:
                self._idle.append(child)
            else:
                await self._end(child)

    async def _take(self, template: ChatTemplate) -> _Child:
        """Return an idle process of ``template``, or a new one."""
        if self._idle:
            child = self._idle.pop()
            if child.template is template:
                return child
            await self._end(child)
        if not self._is_open:
            raise EngineError("the engine is closed")
        try:
            child = await _Child.start(template)
        except OSError as error:
            raise EngineError(f"no process can be started to render in: {error}") from error
        self._all.add(child)
        if not self._is_open:  # closed meanwhile
            await self._end(child)
            raise EngineError("the engine is closed")
        return child

    async def _end(self, child: _Child) -> None:
        self._all.discard(child)
        await child.end()


def _refuse(reason: str) -> InvalidRequest:
    return InvalidRequest(reason, param="messages")
