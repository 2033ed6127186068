"""Answers of ``/v1/responses``, as events and as a whole."""

from __future__ import annotations

import time
from collections.abc import Callable

import attrs
import msgspec

from trioserve.http.api.openai.chat.writer import WantedChat
from trioserve.http.api.openai.responses.events import (
    OutputTextDelta,
    ResponseCompleted,
    ResponseCreated,
    ResponseEvent,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
)
from trioserve.http.api.openai.responses.output import ItemBuilder, Tell
from trioserve.http.api.openai.responses.replies import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseFault,
    ResponseReply,
    ResponseUsage,
)
from trioserve.http.api.sse import typed_event
from trioserve.http.server.error_body import ErrorResponse
from trioserve.requests.generation import GenerationStream
from trioserve.requests.stream import Chunk

_STATUSES = {"stop": "completed", "length": "incomplete"}
"""Statuses of responses by the engine's finish reason; any other reason is an administrator's
abort.
"""
_FAULTS = {"invalid_request_error": "invalid_prompt", "rate_limit_error": "rate_limit_exceeded"}
"""Error codes by types of errors; every other error is the server's fault."""

_encode = msgspec.json.Encoder().encode


@attrs.define(eq=False)
class ResponseMaker:
    """Builder of a response from the engine's chunks.

    Args:
        reply: the response before there is any output.
        wanted: the parts of the answer that the request wants.
    """

    reply: ResponseReply
    _wanted: WantedChat
    tell: Tell = attrs.field(default=lambda event: None, init=False)
    """Function that gets each event of the output in its turn."""
    _answer: ItemBuilder | None = attrs.field(default=None, init=False)
    _stream: GenerationStream | None = attrs.field(default=None, init=False)

    @property
    def answer(self) -> ItemBuilder:
        """Return the answer so far, once it has begun."""
        assert self._answer is not None
        return self._answer

    def begin(self, stream: GenerationStream) -> None:
        """Note that the request is admitted; its output is that of ``stream``."""
        self._stream = stream
        reader = self._wanted.options.reader(stream.prompt_token_ids)
        self._answer = ItemBuilder(self._wanted, reader, self.tell)

    def finish(self) -> ResponseReply:
        """Return the whole response, once its last chunk has been added."""
        assert self._stream is not None
        answer, usage = self.answer, self._stream.usage
        assert answer.finish_reason is not None
        status = _STATUSES.get(answer.finish_reason, "cancelled")
        self.reply = msgspec.structs.replace(
            self.reply,
            status=status,
            completed_at=int(time.time()) if status == "completed" else None,
            output=answer.items,
            incomplete_details=IncompleteDetails() if status == "incomplete" else None,
            usage=ResponseUsage(
                input_tokens=usage.prompt_tokens,
                input_tokens_details=InputTokensDetails(cached_tokens=usage.cached_tokens),
                output_tokens=usage.completion_tokens,
                output_tokens_details=OutputTokensDetails(
                    reasoning_tokens=answer.num_reasoning_tokens
                ),
                total_tokens=usage.total_tokens,
            ),
        )
        return self.reply

    def fail(self, fault: ResponseFault) -> ResponseReply:
        """Return the response so far, with its error."""
        output = [] if self._answer is None else self._answer.items
        self.reply = msgspec.structs.replace(
            self.reply, status="failed", output=output, error=fault
        )
        return self.reply


@attrs.define(eq=False)
class ResponseWriter:
    """Events of a streamed response.

    Args:
        maker: makes the response; it is finished before the end of the stream is asked for.
    """

    _maker: ResponseMaker
    _num_events: int = attrs.field(default=0, init=False)
    _untaken: list[bytes] = attrs.field(factory=list, init=False)
    """Events that haven't been sent."""
    _text_event: _TextEvent | None = attrs.field(default=None, init=False)
    """Event of the open message, if only its text comes."""

    def start(self, streams: list[GenerationStream]) -> bytes:
        """Return two events with the response before any output."""
        (stream,) = streams
        self._maker.tell = self._tell
        self._maker.begin(stream)
        self._tell(ResponseCreated(response=self._maker.reply))
        self._tell(ResponseInProgress(response=self._maker.reply))
        return self._taken()

    def chunk(self, index: int, chunk: Chunk) -> bytes:
        """Return the events of a chunk; none if a step added nothing to send yet."""
        if (event := self.text(chunk)) is not None:
            return event
        answer = self._maker.answer
        answer.add(chunk)
        message = answer.plain_message
        if message is None:
            self._text_event = None
        elif self._text_event is None:
            self._text_event = _TextEvent.of(message.delta, message.pieces)
        return self._taken()

    def text(self, chunk: Chunk) -> bytes | None:
        """Return the event of a chunk that only adds text to the open message."""
        if self._text_event is None or chunk.finish_reason is not None:
            return None
        if not chunk.text:
            return b""
        number = self._num_events
        self._num_events += 1
        return self._text_event.encoded(chunk.text, number)

    def end(self, streams: list[GenerationStream]) -> bytes:
        """Return the whole response; nothing follows, as in OpenAI's API."""
        reply = self._maker.reply
        last = ResponseCompleted if reply.status == "completed" else ResponseIncomplete
        self._tell(last(response=reply))
        return self._taken()

    def failure(self, body: bytes) -> bytes:
        """Return the response so far, with the error that has this body."""
        detail = msgspec.json.decode(body, type=ErrorResponse).error
        code = _FAULTS.get(detail.type, "server_error")
        fault = ResponseFault(code=code, message=detail.message)
        self._tell(ResponseFailed(response=self._maker.fail(fault)))
        return self._taken()

    def _tell(self, event: ResponseEvent) -> None:
        event.sequence_number = self._num_events
        self._num_events += 1
        self._untaken.append(typed_event(event))

    def _taken(self) -> bytes:
        events = b"".join(self._untaken)
        self._untaken.clear()
        return events


_MARK = "\0"
"""Placeholder of the text while the rest of an event is prepared."""
_ENCODED_MARK = b'"\\u0000"'
_NUMBER = b'"sequence_number":'


@attrs.frozen
class _TextEvent:
    """Event of more text, encoded except for the text and the event's number.

    ``pieces`` are those of the message, to which the text is added.
    """

    _before: bytes
    _between: bytes
    _after: bytes
    _pieces: list[str]

    @classmethod
    def of(cls, make_event: Callable[[str], OutputTextDelta], pieces: list[str]) -> _TextEvent:
        """Return the encoded event; ``make_event`` makes the event of a text."""
        # The number is the first field, the text the last one.
        head, _, after = typed_event(make_event(_MARK)).rpartition(_ENCODED_MARK)
        before, number, between = head.partition(_NUMBER + b"0")
        return cls(before + number[:-1], between, after, pieces)

    def encoded(self, text: str, number: int) -> bytes:
        """Return the event of ``text``, and add it to the message."""
        self._pieces.append(text)
        return b"%b%d%b%b%b" % (self._before, number, self._between, _encode(text), self._after)
