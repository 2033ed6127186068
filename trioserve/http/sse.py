"""Server-sent events: the body of a streaming response, and the bytes of its events.

The body is an object with ``__aenter__`` and ``__aexit__``, never an async generator: a generator
that is dropped before its first step never runs its ``finally``, and the generations' scope has to
be entered and left in the task that serves the request.
"""

from __future__ import annotations

import functools
from types import TracebackType
from typing import Any, Protocol

import msgspec
import trio
from quart.wrappers.response import Response, ResponseBody

from trioserve.generation import GenerationStream
from trioserve.http.access_log import AccessRecord
from trioserve.http.generations import Generations
from trioserve.http.threads import num_in_entries, run_if_long
from trioserve.stream import Chunk

__all__ = [
    "DONE",
    "KEEP_ALIVE",
    "EventStream",
    "StreamWriter",
    "event",
    "raw_event",
    "stream_response",
]

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

_encoder = msgspec.json.Encoder()


def event(value: Any) -> bytes:
    """One event whose data is ``value`` as JSON."""
    return b"data: %b\n\n" % _encoder.encode(value)


def raw_event(body: bytes) -> bytes:
    """One event whose data is ``body``, JSON already."""
    return b"data: %b\n\n" % body


class StreamWriter(Protocol):
    """How one endpoint puts its output into events. Pure: bytes out, no waiting.

    What is long runs in a thread, but never two of its methods at once.
    """

    def start(self, streams: list[GenerationStream]) -> bytes:
        """What is sent before the first chunk; may be empty."""
        ...

    def chunk(self, index: int, chunk: Chunk) -> bytes:
        """The events of one chunk; empty where there is nothing to tell.

        ``index`` is that of the prompt, ``chunk.index`` that of the output.
        """
        ...

    def end(self, streams: list[GenerationStream]) -> bytes:
        """What is sent after the last chunk, before ``[DONE]``; may be empty."""
        ...


class EventStream(ResponseBody):
    """The body of a streaming response. Entering it waits until the generations are admitted.

    Errors of the generations come out of ``__aenter__`` (before the response has begun) or out of
    the iteration; :class:`~trioserve.http.asgi.HTTPConnection` makes them a response or an event.
    """

    def __init__(
        self,
        generations: Generations,
        writer: StreamWriter,
        *,
        record: AccessRecord,
        keep_alive_interval: float,
    ) -> None:
        self._generations = generations
        self._writer = writer
        self._record = record
        self._keep_alive_interval = keep_alive_interval
        self._begun: set[tuple[int, int]] = set()
        self._started = False
        self._ended = False

    async def __aenter__(self) -> EventStream:
        await self._generations.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._record.note_streams(self._generations.streams)
        await self._generations.__aexit__(exc_type, exc_value, traceback)

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> bytes:
        """The next events, or a comment after a long silence."""
        if not self._started:
            self._started = True
            if data := self._writer.start(self._generations.streams):
                return data
        if self._ended:
            raise StopAsyncIteration
        while True:
            with trio.move_on_after(self._keep_alive_interval) as silence:
                try:
                    index, chunk = await self._generations.receive()
                except trio.EndOfChannel:
                    self._ended = True
                    return self._writer.end(self._generations.streams) + DONE
            if silence.cancelled_caught:
                return KEEP_ALIVE
            self._record.note_chunk(index, chunk)
            weight = self._weight(index, chunk)
            write = functools.partial(self._writer.chunk, index, chunk)
            if data := await run_if_long(weight, write):
                return data

    def _weight(self, index: int, chunk: Chunk) -> int:
        """How many log-probabilities there may be to tell: the prompt's with an output's first."""
        weight = num_in_entries(chunk.logprobs)
        output = (index, chunk.index)
        if output in self._begun:
            return weight
        self._begun.add(output)
        stream = self._generations.streams[index]
        if stream.prompt_logprobs is None:
            return weight
        return weight + len(stream.prompt_token_ids) * stream.prompt_logprobs.num_for_each


def stream_response(body: EventStream) -> Response:
    """A response with ``body``, and the headers that keep proxies from holding events back."""
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return Response(body, status=200, headers=headers, content_type="text/event-stream")
