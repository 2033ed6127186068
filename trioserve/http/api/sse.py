"""Server-sent events: the body of a streaming response, and the encoding of its events.

The body is an object with ``__aenter__`` and ``__aexit__``, never an async generator. A generator
that is dropped before its first step never runs its ``finally``. The scope of the generations has
to be entered and left in the task that serves the request.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import math
from collections.abc import Awaitable, Callable, Iterator
from types import TracebackType
from typing import Any, Protocol

import attrs
import msgspec
import trio
from quart.wrappers.response import Response, ResponseBody

from trioserve.http.api.access_log import AccessRecord
from trioserve.http.api.generations import Generations
from trioserve.http.api.threads import TENSOR_BYTES, num_in_entries, run_if_long
from trioserve.http.server.fast_path import WriteNow
from trioserve.requests.generation import GenerationStream
from trioserve.requests.stream import Chunk

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

_encoder = msgspec.json.Encoder()


def event(value: Any) -> bytes:
    """Return one event with ``value`` as JSON."""
    return b"data: %b\n\n" % _encoder.encode(value)


def typed_event(value: msgspec.Struct) -> bytes:
    """Return one event with ``value`` as JSON; the class's tag is the event's name."""
    tag = str(value.__struct_config__.tag).encode()
    return b"event: %b\ndata: %b\n\n" % (tag, _encoder.encode(value))


def named_event(name: str, value: Any) -> bytes:
    """Return one event with ``value`` as JSON and a name."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encoder.encode(value))


def raw_event(body: bytes) -> bytes:
    """Return one event with ``body``, which is JSON already."""
    return b"data: %b\n\n" % body


@attrs.frozen(kw_only=True)
class Framing:
    """Fixed parts of an API's streams, besides the events of the writer."""

    content_type: str = "text/event-stream"
    last: bytes = DONE
    """End of every stream."""
    keep_alive: bytes = KEEP_ALIVE
    """Bytes sent in silence, so that the connection isn't cut off."""
    error: Callable[[bytes], bytes] = raw_event
    """Function that makes the last event of an error's body."""


class StreamWriter(Protocol):
    """Encoder of an endpoint's output as events. It returns bytes and never waits.

    Long calls run in a thread, but never two of its methods at once.
    """

    def start(self, streams: list[GenerationStream]) -> bytes:
        """Return the bytes before the first chunk; may be empty."""
        ...

    def chunk(self, index: int, chunk: Chunk) -> bytes:
        """Return the events of one chunk; empty if there is nothing to send.

        ``index`` is the number of the prompt, ``chunk.index`` that of the output.
        """
        ...

    def text(self, chunk: Chunk) -> bytes | None:
        """Return the event of a chunk of the only prompt that adds text and nothing else.

        None if the chunk does more or the event takes long to make; then nothing has changed.
        """
        ...

    def end(self, streams: list[GenerationStream]) -> bytes:
        """Return the bytes after the last chunk, before the fixed end; may be empty."""
        ...


class EventBody(ResponseBody):
    """Body of a streaming response: an async iterator over its pieces, while it is entered.

    ``__aenter__`` raises errors before the response has begun, the iteration later ones;
    :class:`~trioserve.http.api.asgi.HTTPConnection` makes them a response or an event.
    """

    framing: Framing
    write_now: WriteNow | None = None
    """Function that sends events from outside the task that reads this, if that is possible."""

    @property
    def look_again_at(self) -> float:
        """Return the earliest time at which a keep-alive may be due."""
        return math.inf

    def note_if_silent(self) -> bool:
        """Return whether a keep-alive is due now; it then counts as sent."""
        return False

    @abc.abstractmethod
    async def __aenter__(self) -> EventBody: ...

    def __aiter__(self) -> EventBody:
        return self

    @abc.abstractmethod
    async def __anext__(self) -> bytes:
        """Return the next events."""


class FeedBody(EventBody):
    """Body of a feed that isn't of a request. What it enters in its scope is left with it."""

    framing = Framing(last=b"")

    def __init__(self) -> None:
        self._scope = contextlib.AsyncExitStack()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # The client's disconnect isn't an error of what the feed reads.
        await self._scope.aclose()


class SilenceBody(EventBody):
    """Body that has keep-alives while the next event is waited for.

    Args:
        keep_alive_interval: Seconds of silence before one is sent.
    """

    def __init__(self, keep_alive_interval: float) -> None:
        self._keep_alive_interval = keep_alive_interval
        self._waiting_since = math.inf
        """Time since which the next event is waited for; infinite while it isn't."""

    @property
    def look_again_at(self) -> float:
        """Return the earliest time at which a keep-alive may be due."""
        return min(self._waiting_since, trio.current_time()) + self._keep_alive_interval

    def note_if_silent(self) -> bool:
        """Return whether a keep-alive is due now; it then counts as sent."""
        now = trio.current_time()
        if now < self._waiting_since + self._keep_alive_interval:
            return False
        self._waiting_since = now
        return True

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait for the next event in the block."""
        self._waiting_since = trio.current_time()
        try:
            yield
        finally:
            self._waiting_since = math.inf


class EventStream(SilenceBody):
    """Events of generations. Entering blocks until they are admitted.

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
        super().__init__(keep_alive_interval)
        self._generations = generations
        self._writer = writer
        self._record = record
        self.framing = framing
        self._before_end = before_end
        self._begun: set[tuple[int, int]] = set()
        self._started = False
        self._has_output = False
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
        """Send a chunk at once, while the task that reads this waits for it and goes on waiting.

        The task that has made the chunk calls this. Waking the reading task would cost more than
        the event. It returns False if the reading task has to handle the chunk.
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
        """Return an upper bound of the log-probabilities to send; arrays count for some."""
        weight = 0 if chunk.logprobs is None else num_in_entries(chunk.logprobs)
        stream = self._generations.streams[index]
        if chunk.finish_reason is not None:
            weight += stream.num_tensor_bytes // TENSOR_BYTES
        output = (index, chunk.index)
        if stream.prompt_logprobs is None or output in self._begun:
            return weight
        self._begun.add(output)
        return weight + len(stream.prompt_token_ids) * stream.prompt_logprobs.num_for_each


def stream_response(body: EventBody) -> Response:
    """Return a response with ``body``, and headers that keep proxies from buffering events."""
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return Response(body, status=200, headers=headers, content_type=body.framing.content_type)
