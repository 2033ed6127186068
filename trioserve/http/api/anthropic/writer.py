"""Answers of ``/v1/messages``: blocks, whole or as they grow."""

from __future__ import annotations

import attrs
import msgspec

from trioserve.http.api.anthropic.schemas import (
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputJsonDelta,
    MessageChange,
    MessageDelta,
    MessageReply,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from trioserve.http.api.openai.chat.answer import AnswerReader, ReaderOptions
from trioserve.http.api.openai.chat.arguments import arguments_object
from trioserve.http.api.openai.chat.schemas import ToolCallDelta
from trioserve.http.api.openai.writer import TextEvent
from trioserve.http.api.sse import Framing, typed_event
from trioserve.requests.generation import Completion, GenerationStream, Usage
from trioserve.requests.stream import Chunk

FRAMING = Framing(
    last=b"",
    keep_alive=typed_event(Ping()),
    error=lambda body: b"event: error\ndata: %b\n\n" % body,
)
"""Framing of Anthropic's streams, which ``message_stop`` ends."""


def message_usage(usage: Usage) -> MessageUsage:
    """Return usage in Anthropic's form."""
    return MessageUsage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
    )


def _ending(finish: str, stop: int | str | None, *, has_calls: bool) -> MessageChange:
    """Return Anthropic's stop reason and sequence for the engine's ``finish`` and ``stop``."""
    sequence = None
    if finish == "length":
        reason = "max_tokens"
    elif has_calls:
        reason = "tool_use"
    elif isinstance(stop, str):
        reason, sequence = "stop_sequence", stop
    else:
        reason = "end_turn"
    return MessageChange(stop_reason=reason, stop_sequence=sequence)


def message_reply(completion: Completion, options: ReaderOptions, *, model: str) -> MessageReply:
    """Return the whole answer."""
    reader = options.reader(completion.prompt_token_ids)
    delta = reader.feed(completion.text, last=True)
    content: list[TextBlock | ThinkingBlock | ToolUseBlock] = []
    if delta.reasoning is not None:
        content.append(ThinkingBlock(thinking=delta.reasoning))
    if delta.content is not None:
        content.append(TextBlock(text=delta.content))
    for call in delta.tool_calls or ():
        block = _tool_use(call)
        block.input = arguments_object(call.function.arguments or "")
        content.append(block)
    end = _ending(completion.finish_reason, completion.stop_reason, has_calls=reader.has_calls)
    return MessageReply(
        id=completion.request_id,
        model=model,
        content=content,
        stop_reason=end.stop_reason,
        stop_sequence=end.stop_sequence,
        usage=message_usage(completion.usage),
    )


def _tool_use(call: ToolCallDelta) -> ToolUseBlock:
    """Return the block of a call that begins, without its input."""
    return ToolUseBlock(id=call.id or "", name=call.function.name or "", input={})


@attrs.define(eq=False, kw_only=True)
class MessageWriter:
    """Events of a streamed answer: for each block its beginning, its additions, and its end."""

    id: str
    model: str
    options: ReaderOptions
    _reader: AnswerReader = attrs.field(factory=AnswerReader, init=False)
    _open: type[msgspec.Struct] | None = attrs.field(default=None, init=False)
    """Class of the block that grows."""
    _index: int = attrs.field(default=-1, init=False)
    """Number of that block."""
    _text_event: TextEvent | None = attrs.field(default=None, init=False)
    """Event of all further chunks, once there is only text to come."""
    _end: MessageChange | None = attrs.field(default=None, init=False)

    def start(self, streams: list[GenerationStream]) -> bytes:
        """Return the event with the message's id and model."""
        (stream,) = streams
        self._reader = self.options.reader(stream.prompt_token_ids)
        usage = message_usage(stream.usage)
        return typed_event(
            MessageStart(MessageReply(id=self.id, model=self.model, content=[], usage=usage))
        )

    def text(self, chunk: Chunk) -> bytes | None:
        """Return the event of a chunk that only adds to the text; None for any other."""
        if self._text_event is None or chunk.finish_reason is not None:
            return None
        return self._text_event.encoded(chunk.text) if chunk.text else b""

    def chunk(self, index: int, chunk: Chunk) -> bytes:
        """Return a chunk's events; none if a step added nothing to send yet."""
        if (event := self.text(chunk)) is not None:
            return event
        delta = self._reader.feed(chunk.text, last=chunk.finish_reason is not None)
        events = b""
        if delta.reasoning is not None:
            if self._open is not ThinkingBlock:
                events += self._begin(ThinkingBlock(thinking=""))
            events += self._grown(ThinkingDelta(delta.reasoning))
        if delta.content is not None:
            if self._open is not TextBlock:
                events += self._begin(TextBlock(text=""))
            events += self._grown(TextDelta(delta.content))
            if self._reader.plain:
                self._text_event = TextEvent.of(lambda text: self._grown(TextDelta(text)))
        for call in delta.tool_calls or ():
            if call.id is not None:
                events += self._begin(_tool_use(call))
            if call.function.arguments:
                events += self._grown(InputJsonDelta(call.function.arguments))
        if chunk.finish_reason is not None:
            self._end = _ending(
                chunk.finish_reason, chunk.stop_reason, has_calls=self._reader.has_calls
            )
        return events

    def end(self, streams: list[GenerationStream]) -> bytes:
        """Return the end of the last block, and of the message."""
        (stream,) = streams
        end = self._end or MessageChange(stop_reason=None, stop_sequence=None)
        return b"".join(
            (
                self._close(),
                typed_event(MessageDelta(end, message_usage(stream.usage))),
                typed_event(MessageStop()),
            )
        )

    def _begin(self, block: TextBlock | ThinkingBlock | ToolUseBlock) -> bytes:
        """Return the end of the block before, and the beginning of ``block``."""
        before = self._close()
        self._open, self._index = type(block), self._index + 1
        return before + typed_event(ContentBlockStart(self._index, block))

    def _grown(self, delta: TextDelta | ThinkingDelta | InputJsonDelta) -> bytes:
        return typed_event(ContentBlockDelta(self._index, delta))

    def _close(self) -> bytes:
        return b"" if self._open is None else typed_event(ContentBlockStop(self._index))
