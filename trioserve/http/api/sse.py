"""Server-sent events: the body of a streaming response, and the bytes of its events.

The body is an object with ``__aenter__`` and ``__aexit__``, never an async generator: a generator
that is dropped before its first step never runs its ``finally``, and the generations' scope has to
be entered and left in the task that serves the request.
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Protocol

import attrs
import msgspec
import trio
from quart.wrappers.response import Response, ResponseBody

from trioserve.http.api.access_log import AccessRecord
from trioserve.http.api.generations import Generations
from trioserve.http.api.threads import num_in_entries, run_if_long
from trioserve.http.server.fast_path import WriteNow
from trioserve.requests.generation import GenerationStream
from trioserve.requests.stream import Chunk

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

_encoder = msgspec.json.Encoder()


def event(value: Any) -> bytes:
    """One event whose data is ``value`` as JSON."""
    return b"data: %b\n\n" % _encoder.encode(value)


def typed_event(value: msgspec.Struct) -> bytes:
    """The same of a class with a tag, which is the event's name, too."""
    tag = str(value.__struct_config__.tag).encode()
    return b"event: %b\ndata: %b\n\n" % (tag, _encoder.encode(value))


def named_event(name: str, value: Any) -> bytes:
    """The same of anything, with a name."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encoder.encode(value))


def raw_event(body: bytes) -> bytes:
    """One event whose data is ``body``, JSON already."""
    return b"data: %b\n\n" % body


@attrs.frozen(kw_only=True)
class Framing:
    """What a stream holds beside the events of its writer, as an endpoint's clients know it."""

    content_type: str = "text/event-stream"
    last: bytes = DONE
    """What comes behind everything else."""
    keep_alive: bytes = KEEP_ALIVE
    """What is sent while there is nothing to tell, for the connection not to be cut off."""
    error: Callable[[bytes], bytes] = raw_event
    """Makes the last event of the body of an error."""


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

    def text(self, chunk: Chunk) -> bytes | None:
        """The same of the only prompt, where the chunk adds text and nothing else, and an event of
        that is quickly made; else None, and nothing has happened."""
        ...

    def end(self, streams: list[GenerationStream]) -> bytes:
        """What is sent after the last chunk, before what ends every stream; may be empty."""
        ...


class EventBody(ResponseBody):
    """The body of a streaming response: an async iterator over its pieces, while it is entered.

    Errors come out of ``__aenter__`` (before the response has begun) or out of the iteration;
    :class:`~trioserve.http.api.asgi.HTTPConnection` makes them a response or an event.
    """

    framing: Framing
    write_now: WriteNow | None = None
    """How to send events from outside of the task that reads this, if that is possible."""

    @property
    def look_again_at(self) -> float:
        """When the reader may have heard nothing for too long, as far as is known."""
        return math.inf

    def note_if_silent(self) -> bool:
        """Whether to keep the connection alive now, which is counted as done."""
        return False

    @abc.abstractmethod
    async def __aenter__(self) -> EventBody: ...

    def __aiter__(self) -> EventBody:
        return self

    @abc.abstractmethod
    async def __anext__(self) -> bytes:
        """The next events."""


class EventStream(EventBody):
    """What generations give. Entering it waits until they are admitted.

    ``before_end`` is awaited after the last chunk, before the writer is asked for the end.
    """

    def __init__(
        self,
        generations: Generations,
        writer: StreamWriter,
        *,
        record: AccessRecord,
        keep_alive_interval: float,
        framing: Framing,
        before_end: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._generations = generations
        self._writer = writer
        self._record = record
        self._keep_alive_interval = keep_alive_interval
        self.framing = framing
        self._before_end = before_end
        self._begun: set[tuple[int, int]] = set()
        self._started = False
        self._has_output = False
        self._ended = False
        self._waiting_since = math.inf
        """Since when the next chunk is waited for; never, while it isn't."""

    @property
    def look_again_at(self) -> float:
        """When the reader may have heard nothing for too long, as far as is known."""
        return min(self._waiting_since, trio.current_time()) + self._keep_alive_interval

    def note_if_silent(self) -> bool:
        """Whether to keep the connection alive now, which is counted as done."""
        now = trio.current_time()
        if now < self._waiting_since + self._keep_alive_interval:
            return False
        self._waiting_since = now
        return True

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

    async def __anext__(self) -> bytes:
        if not self._started:
            self._started = True
            if self.write_now is not None and self._record.contents is None:
                self._generations.offer_to(self._send_now)
            if data := self._writer.start(self._generations.streams):
                return data
        if self._ended:
            raise StopAsyncIteration
        if self._has_output:  # and it has been sent since
            self._record.note_sent()
        while True:
            self._waiting_since = trio.current_time()
            try:
                index, chunk = await self._generations.receive()
            except trio.EndOfChannel:
                self._ended = True
                if self._before_end is not None:
                    await self._before_end()
                return self._writer.end(self._generations.streams) + self.framing.last
            finally:
                self._waiting_since = math.inf
            if chunk.finish_reason is not None or self._record.contents is not None:
                self._record.note_chunk(index, chunk)
            weight = self._weight(index, chunk)
            if weight:
                write = functools.partial(self._writer.chunk, index, chunk)
                data = await run_if_long(weight, write)
            else:
                data = self._writer.chunk(index, chunk)
            if data:
                self._has_output = True
                return data

    def _send_now(self, chunk: Chunk) -> bool:
        """Send a chunk as it comes, while the task that reads this waits for it, and go on waiting.

        Called by whoever has made the chunk. It spares that task being woken, which costs more
        than the event. False where the task is to see to the chunk.
        """
        data = self._writer.text(chunk)
        if data is None:
            return False
        if data:
            assert self.write_now is not None
            if not self.write_now(data):
                return False
            self._record.note_sent()
            self._waiting_since = trio.current_time()
        return True

    def _weight(self, index: int, chunk: Chunk) -> int:
        """How many log-probabilities there may be to tell: the prompt's with an output's first."""
        weight = 0 if chunk.logprobs is None else num_in_entries(chunk.logprobs)
        stream = self._generations.streams[index]
        output = (index, chunk.index)
        if stream.prompt_logprobs is None or output in self._begun:
            return weight
        self._begun.add(output)
        return weight + len(stream.prompt_token_ids) * stream.prompt_logprobs.num_for_each


def stream_response(body: EventBody) -> Response:
    """A response with ``body``, and the headers that keep proxies from holding events back."""
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return Response(body, status=200, headers=headers, content_type=body.framing.content_type)
