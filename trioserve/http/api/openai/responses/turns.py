"""Encoding of a kept response: itself, its own input, and possibly the history before it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from trioserve.http.api.openai.chat.messages import RefusalPart
from trioserve.http.api.openai.responses.items import (
    CallItem,
    CallOutputItem,
    ContentPart,
    InputImage,
    InputItem,
    InputText,
    MessageItem,
    OutputText,
    ReasoningItem,
)
from trioserve.http.api.openai.responses.output import item_id
from trioserve.http.api.openai.responses.replies import (
    OutputCall,
    OutputItem,
    OutputReasoning,
    ResponseReply,
)


class _Turn(msgspec.Struct):
    input: list[InputItem]
    output: list[InputItem]
    """The response as items, as a later prompt may have them."""
    history: list[InputItem] = []
    """Items before it, if these aren't kept as turns of their own."""


_BETWEEN = b"\n"
"""Separator of the response and the rest: JSON on one line has no line break."""
_decode = msgspec.json.Decoder(_Turn).decode


def encoded_turn(
    response: ResponseReply, input: Sequence[InputItem], history: Sequence[InputItem] = ()
) -> bytes:
    """Return the bytes to keep of a response."""
    turn = _Turn(
        input=list(input),
        output=[_as_input(item) for item in response.output],
        history=list(history),
    )
    return msgspec.json.encode(response) + _BETWEEN + msgspec.json.encode(turn)


def response_of(turn: bytes) -> memoryview:
    """Return the response as JSON, without a copy."""
    return memoryview(turn)[: turn.index(_BETWEEN)]


def _turn_of(turn: bytes) -> _Turn:
    return _decode(memoryview(turn)[turn.index(_BETWEEN) + len(_BETWEEN) :])


def input_of(turn: bytes) -> list[InputItem]:
    """Return its own input."""
    return _turn_of(turn).input


def items_of(turns: Iterable[bytes]) -> list[InputItem]:
    """Return all items of a conversation, outputs among them, in their order."""
    items: list[InputItem] = []
    for turn in map(_turn_of, turns):
        items += [*turn.history, *turn.input, *turn.output]
    return items


def _as_input(item: OutputItem) -> InputItem:
    if isinstance(item, OutputCall):
        return CallItem(call_id=item.call_id, name=item.name, arguments=item.arguments)
    if isinstance(item, OutputReasoning):
        return ReasoningItem(content=item.content)
    parts: list[ContentPart] = [OutputText(text=part.text) for part in item.content]
    return MessageItem(role="assistant", content=parts)


_PREFIXES = {MessageItem: "msg", CallItem: "fc", CallOutputItem: "fco", ReasoningItem: "rs"}


def listed_items(items: Iterable[InputItem]) -> list[InputItem]:
    """Return items as they are listed: each with an id and a status, and messages in parts.

    Items that ask nothing of the output are left out: the model hasn't seen them.
    """
    return [_listed(item) for item in items]


def _listed(item: InputItem) -> InputItem:
    id = item.id or item_id(_PREFIXES[type(item)])
    item = msgspec.structs.replace(item, id=id, status=item.status or "completed")
    if isinstance(item, MessageItem):
        item.content = _parts(item.content, is_said=item.role == "assistant")
    elif isinstance(item, ReasoningItem):
        item.summary = []
    elif isinstance(item, CallOutputItem) and isinstance(item.output, list):
        item.output = [InputText(text=part.text) for part in item.output]
    return item


def _parts(content: str | list[ContentPart], *, is_said: bool) -> list[ContentPart]:
    """Return a message's content in parts, as output texts if ``is_said``, else as input texts."""
    if isinstance(content, str):
        return [_said(content) if is_said else InputText(text=content)]
    return [_part(part) for part in content]


def _part(part: ContentPart) -> ContentPart:
    if isinstance(part, RefusalPart | InputImage):
        return part
    return _said(part.text) if isinstance(part, OutputText) else InputText(text=part.text)


def _said(text: str) -> OutputText:
    """Return an output text with all fields of an answer's part."""
    return OutputText(text=text, annotations=[], logprobs=[])
