"""Items of an answer as they come: reasoning, messages and calls, one after the other.

Each piece of the answer either extends the open item, or closes it and opens another. All of it is
sent as events, with or without a listener, so the same code makes a streamed response and a whole
one.
"""

from __future__ import annotations

import abc
import uuid
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

import attrs

from trioserve.http.api.openai.chat.answer import AnswerReader
from trioserve.http.api.openai.chat.schemas import ChatLogprob, ToolCallDelta
from trioserve.http.api.openai.chat.writer import WantedChat
from trioserve.http.api.openai.responses.events import (
    CallArgumentsDelta,
    CallArgumentsDone,
    ContentPartAdded,
    ContentPartDone,
    OutputItemAdded,
    OutputItemDone,
    OutputTextDelta,
    OutputTextDone,
    ReasoningTextDelta,
    ReasoningTextDone,
    ResponseEvent,
)
from trioserve.http.api.openai.responses.items import ReasoningText
from trioserve.http.api.openai.responses.replies import (
    ItemStatus,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputTextReply,
)
from trioserve.requests.stream import Chunk, TokenLogprob

Tell = Callable[[ResponseEvent], None]

Item = TypeVar("Item", bound="_OpenItem")


def item_id(prefix: str) -> str:
    """Return a new id of an item."""
    return f"{prefix}_{uuid.uuid4().hex}"


@attrs.define(eq=False, kw_only=True)
class _OpenItem(abc.ABC):
    """An item that grows."""

    ID_PREFIX: ClassVar[str]

    tell: Tell
    index: int
    id: str = attrs.field(
        init=False, default=attrs.Factory(lambda self: item_id(self.ID_PREFIX), takes_self=True)
    )
    pieces: list[str] = attrs.field(factory=list, init=False)
    """Pieces of its text."""

    @abc.abstractmethod
    def begin(self) -> None:
        """Send the event of its beginning."""

    @abc.abstractmethod
    def add(self, text: str) -> None:
        """Add another piece."""

    @abc.abstractmethod
    def end(self, status: ItemStatus) -> OutputItem:
        """Return the whole item; nothing follows."""

    def _tell_begin(self, item: OutputItem) -> None:
        self.tell(OutputItemAdded(output_index=self.index, item=item))

    def _tell_end(self, item: OutputItem) -> None:
        self.tell(OutputItemDone(output_index=self.index, item=item))

    def _tell_part(self, part: OutputTextReply | ReasoningText) -> None:
        self.tell(ContentPartAdded(output_index=self.index, item_id=self.id, part=part))

    def _tell_part_end(self, part: OutputTextReply | ReasoningText) -> None:
        self.tell(ContentPartDone(output_index=self.index, item_id=self.id, part=part))


@attrs.define(eq=False, kw_only=True)
class _OpenMessage(_OpenItem):
    ID_PREFIX = "msg"

    logprobs: list[ChatLogprob] = attrs.field(factory=list, init=False)

    def begin(self) -> None:
        self._tell_begin(OutputMessage(id=self.id, status="in_progress", content=[]))
        self._tell_part(OutputTextReply(text=""))

    def add(self, text: str, logprobs: Sequence[ChatLogprob] = ()) -> None:
        self.pieces.append(text)
        self.logprobs.extend(logprobs)
        self.tell(self.delta(text, logprobs))

    def delta(self, text: str, logprobs: Sequence[ChatLogprob] = ()) -> OutputTextDelta:
        """Return the event of another piece."""
        return OutputTextDelta(
            output_index=self.index, item_id=self.id, delta=text, logprobs=list(logprobs)
        )

    def end(self, status: ItemStatus) -> OutputItem:
        part = OutputTextReply(text="".join(self.pieces), logprobs=self.logprobs)
        self.tell(
            OutputTextDone(
                output_index=self.index, item_id=self.id, text=part.text, logprobs=part.logprobs
            )
        )
        self._tell_part_end(part)
        item = OutputMessage(id=self.id, status=status, content=[part])
        self._tell_end(item)
        return item


@attrs.define(eq=False, kw_only=True)
class _OpenReasoning(_OpenItem):
    ID_PREFIX = "rs"

    def begin(self) -> None:
        self._tell_begin(OutputReasoning(id=self.id, status="in_progress", content=[]))
        self._tell_part(ReasoningText(text=""))

    def add(self, text: str) -> None:
        self.pieces.append(text)
        self.tell(ReasoningTextDelta(output_index=self.index, item_id=self.id, delta=text))

    def end(self, status: ItemStatus) -> OutputItem:
        part = ReasoningText(text="".join(self.pieces))
        self.tell(ReasoningTextDone(output_index=self.index, item_id=self.id, text=part.text))
        self._tell_part_end(part)
        item = OutputReasoning(id=self.id, status=status, content=[part])
        self._tell_end(item)
        return item


@attrs.define(eq=False, kw_only=True)
class _OpenCall(_OpenItem):
    ID_PREFIX = "fc"

    call_id: str
    name: str

    def begin(self) -> None:
        self._tell_begin(self._item("in_progress"))

    def add(self, text: str) -> None:
        self.pieces.append(text)
        self.tell(CallArgumentsDelta(output_index=self.index, item_id=self.id, delta=text))

    def end(self, status: ItemStatus) -> OutputItem:
        item = self._item(status)
        self.tell(
            CallArgumentsDone(
                output_index=self.index,
                item_id=self.id,
                name=self.name,
                arguments=item.arguments,
            )
        )
        self._tell_end(item)
        return item

    def _item(self, status: ItemStatus) -> OutputCall:
        return OutputCall(
            id=self.id,
            status=status,
            call_id=self.call_id,
            name=self.name,
            arguments="".join(self.pieces),
        )


@attrs.define(eq=False)
class ItemBuilder:
    """Builder of items from the engine's chunks.

    Args:
        wanted: the parts of the answer that the request wants.
        reader: tells reasoning, text and calls apart.
        tell: gets each event in its turn.
    """

    _wanted: WantedChat
    _reader: AnswerReader
    _tell: Tell
    items: list[OutputItem] = attrs.field(factory=list, init=False)
    """Items that have ended."""
    finish_reason: str | None = attrs.field(default=None, init=False)
    _open: _OpenItem | None = attrs.field(default=None, init=False)
    _untold: list[TokenLogprob] = attrs.field(factory=list, init=False)
    """Log-probabilities of tokens with text that is still held back."""

    @property
    def num_reasoning_tokens(self) -> int:
        """Return the tokens of reasoning so far."""
        return self._reader.num_reasoning_tokens

    @property
    def plain_message(self) -> _OpenMessage | None:
        """Return the open message, if only its text comes and is sent."""
        is_plain = self._reader.plain and self._wanted.top_logprobs is None
        return self._open if is_plain and isinstance(self._open, _OpenMessage) else None

    def add(self, chunk: Chunk) -> None:
        """Add another piece; the last one closes the open item."""
        before = self.num_reasoning_tokens
        ended = chunk.finish_reason is not None
        delta = self._reader.feed(chunk.text, last=ended, token_ids=chunk.token_ids)
        num_reasoning = min(self.num_reasoning_tokens - before, len(chunk.token_ids))
        if num_reasoning:
            self._untold.clear()
        self._untold += (chunk.logprobs or ())[num_reasoning:]
        calls = delta.tool_calls or []
        if delta.reasoning is not None:
            self._reasoning().add(delta.reasoning)
        for call in calls:
            if call.id is None:  # The call belongs to the open item.
                self._add_arguments(call)
        if delta.content is not None:
            told = self._wanted.logprobs(self._untold)
            self._message().add(delta.content, [] if told is None else told.content)
        for call in calls:
            if call.id is not None:
                self._begin_call(call.id, call)
        if calls or delta.content is not None:
            self._untold.clear()
        if chunk.finish_reason is not None:
            self._finish(chunk.finish_reason)

    def _message(self) -> _OpenMessage:
        """Return the open message; open one if another item is open, or none."""
        if isinstance(self._open, _OpenMessage):
            return self._open
        self._close("completed")
        return self._begin(_OpenMessage(tell=self._tell, index=len(self.items)))

    def _reasoning(self) -> _OpenReasoning:
        """Return the open reasoning; open it if another item is open, or none."""
        if isinstance(self._open, _OpenReasoning):
            return self._open
        self._close("completed")
        return self._begin(_OpenReasoning(tell=self._tell, index=len(self.items)))

    def _begin_call(self, id: str, call: ToolCallDelta) -> None:
        self._close("completed")
        name = call.function.name or ""
        index = len(self.items)
        self._begin(_OpenCall(tell=self._tell, index=index, call_id=id, name=name))
        self._add_arguments(call)

    def _add_arguments(self, call: ToolCallDelta) -> None:
        assert isinstance(self._open, _OpenCall)
        if call.function.arguments:
            self._open.add(call.function.arguments)

    def _begin(self, item: Item) -> Item:
        self._open = item
        item.begin()
        return item

    def _close(self, status: ItemStatus) -> None:
        if self._open is not None:
            self.items.append(self._open.end(status))
            self._open = None

    def _finish(self, reason: str) -> None:
        self.finish_reason = reason
        if self._open is None and not self.items:
            self._message()  # The answer is empty.
        self._close("completed" if reason == "stop" else "incomplete")
