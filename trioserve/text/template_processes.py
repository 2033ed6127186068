"""Processes that render slow chat templates, and the task that owns them.

:mod:`~trioserve.text.template_child` is their program.
"""

from __future__ import annotations

import msgspec

from trioserve._util.job_processes import JobLost, JobProcess, JobProcesses
from trioserve.observability.logs import get_logger
from trioserve.protocol.errors import InvalidRequest
from trioserve.protocol.frames import framed
from trioserve.text.chat_template import ChatTemplate, ConversationFields
from trioserve.text.template_child import MAX_MEMORY, MAX_SECONDS, Rendered, RenderJob, Setup

MAX_PROCESSES = 2
MAX_WAIT = 60.0
"""Seconds to wait for an answer; long, for a busy machine."""

_log = get_logger("trioserve.text")


class TemplateProcesses:
    """A few rendering processes, owned by the task :meth:`run`."""

    def __init__(self) -> None:
        self._processes = JobProcesses(MAX_PROCESSES, _start, "render")

    async def run(self) -> None:
        """Allow :meth:`render` to start processes until cancelled; then end all of them."""
        await self._processes.run()

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
        try:
            async with self._processes.take(template) as process:
                body = await process.answer((frame,), max_bytes=MAX_MEMORY, seconds=MAX_WAIT)
                answer = msgspec.msgpack.decode(body, type=Rendered)
        except JobLost:
            reason = f"more than {MAX_SECONDS} s or {MAX_MEMORY >> 20} MiB"
            _log.warning("a chat template was stopped", reason=f"it took {reason}")
            raise _refuse(f"the chat template takes {reason} to print the messages") from None
        if answer.error:
            raise InvalidRequest(answer.error, param=answer.param)
        return answer.text


async def _start(template: ChatTemplate) -> JobProcess:
    return await JobProcess.start(
        "trioserve.text.template_child",
        _log,
        "process that renders chat templates",
        key=template,
        setup=framed(Setup(template.source, template.tokens)),
    )


def _refuse(reason: str) -> InvalidRequest:
    return InvalidRequest(reason, param="messages")
