"""The events of a transcript that is made while they are sent."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Awaitable, Callable
from types import TracebackType

import trio

from trioserve.engine.transcribing import OnText
from trioserve.http.api.openai.audio.schemas import (
    TextDeltaEvent,
    TextDoneEvent,
    TranscriptTokens,
)
from trioserve.http.api.sse import DONE, Framing, SilenceBody, event
from trioserve.requests.speech.transcript import Transcript


class TranscriptEvents(SilenceBody):
    """Events of a transcript, which a task of its own makes.

    Entering blocks until there is text, or raises the first error. Leaving aborts the transcript.

    Args:
        transcribe: Makes the transcript, and calls its argument with each piece of the text.
        keep_alive_interval: Seconds of silence before a keep-alive is sent.
    """

    framing = Framing()

    def __init__(
        self, transcribe: Callable[[OnText], Awaitable[Transcript]], keep_alive_interval: float
    ) -> None:
        super().__init__(keep_alive_interval)
        self._transcribe = transcribe
        # A transcript's text is short.
        self._to_reader, self._texts = trio.open_memory_channel[str](math.inf)
        self._error: Exception | None = None
        self._transcript: Transcript | None = None
        self._first: bytes | None = None
        self._ended = False
        self._exits = contextlib.AsyncExitStack()

    async def __aenter__(self) -> TranscriptEvents:
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(self._texts)
            nursery = await stack.enter_async_context(trio.open_nursery())
            stack.callback(nursery.cancel_scope.cancel)
            nursery.start_soon(self._run)
            self._first = await self._next()
            if self._error is None:
                self._exits = stack.pop_all()
        if self._error is not None:
            raise self._error
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # The nursery must not see the exception, which it would wrap in a group.
        await self._exits.aclose()

    async def __anext__(self) -> bytes:
        first, self._first = self._first, None
        if first is not None:
            return first
        if self._ended:
            raise StopAsyncIteration
        with self.waiting():
            found = await self._next()
        if self._ended and self._error is not None:
            raise self._error
        return found

    async def _run(self) -> None:
        with self._to_reader:
            try:
                self._transcript = await self._transcribe(self._to_reader.send)
            except Exception as error:
                self._error = error

    async def _next(self) -> bytes:
        """Return the next event, or none if there is an error; the last comes with the end."""
        async for text in self._texts:
            return event(TextDeltaEvent(text))
        self._ended = True
        found = self._transcript
        if found is None:
            return b""
        usage = TranscriptTokens(
            found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens
        )
        return event(TextDoneEvent(found.text, usage)) + DONE
