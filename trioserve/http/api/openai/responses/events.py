"""The events of a streamed response, as classes."""

from __future__ import annotations

from typing import Annotated

import msgspec

from trioserve.http.api.openai.chat.schemas import ChatLogprob
from trioserve.http.api.openai.responses.items import ReasoningText
from trioserve.http.api.openai.responses.replies import OutputItem, OutputTextReply, ResponseReply
from trioserve.http.api.schema.reading import about


class _Event(msgspec.Struct, kw_only=True, tag_field="type"):
    sequence_number: Annotated[int, about("The event's place in the stream, from 0.")] = 0


class _OfResponse(_Event, kw_only=True):
    response: Annotated[ResponseReply, about("The response so far.")]


class ResponseCreated(_OfResponse, tag="response.created"):
    """The request is admitted to the queue."""


class ResponseInProgress(_OfResponse, tag="response.in_progress"):
    """The request is in progress; it repeats the first event."""


class ResponseCompleted(_OfResponse, tag="response.completed"):
    """The last event of a response that is complete."""


class ResponseIncomplete(_OfResponse, tag="response.incomplete"):
    """The last event of one that was cut off, or ended by an administrator."""


class ResponseFailed(_OfResponse, tag="response.failed"):
    """The last event of one that failed; its error says why."""


class _OfItem(_Event, kw_only=True):
    output_index: Annotated[int, about("The item's place in the output, from 0.")]


class OutputItemAdded(_OfItem, tag="response.output_item.added", kw_only=True):
    """An item begins."""

    item: Annotated[OutputItem, about("The item, without what it will hold.")]


class OutputItemDone(_OfItem, tag="response.output_item.done", kw_only=True):
    """An item has ended."""

    item: Annotated[OutputItem, about("The whole item.")]


class _WithinItem(_OfItem, kw_only=True):
    item_id: Annotated[str, about("The item's id.")]


class _OfPart(_WithinItem, kw_only=True):
    content_index: Annotated[int, about("Always 0: an item has one part.")] = 0


class ContentPartAdded(_OfPart, tag="response.content_part.added", kw_only=True):
    """The part of a message, or of reasoning, begins."""

    part: Annotated[OutputTextReply | ReasoningText, about("The part, still empty.")]


class ContentPartDone(_OfPart, tag="response.content_part.done", kw_only=True):
    """It has ended."""

    part: Annotated[OutputTextReply | ReasoningText, about("The whole part.")]


class OutputTextDelta(_OfPart, tag="response.output_text.delta", kw_only=True):
    """A message grows."""

    logprobs: Annotated[
        list[ChatLogprob], about("Log-probabilities of the tokens that come with the text.")
    ] = []
    delta: Annotated[str, about("The added text.")]


class OutputTextDone(_OfPart, tag="response.output_text.done", kw_only=True):
    """A message's text has ended."""

    text: Annotated[str, about("The whole text.")]
    logprobs: Annotated[list[ChatLogprob], about("Log-probabilities of all its tokens.")] = []


class ReasoningTextDelta(_OfPart, tag="response.reasoning_text.delta", kw_only=True):
    """Reasoning grows."""

    delta: Annotated[str, about("The added text.")]


class ReasoningTextDone(_OfPart, tag="response.reasoning_text.done", kw_only=True):
    """Reasoning has ended."""

    text: Annotated[str, about("The whole reasoning.")]


class CallArgumentsDelta(_WithinItem, tag="response.function_call_arguments.delta", kw_only=True):
    """A call's arguments grow."""

    delta: Annotated[str, about("The added JSON.")]


class CallArgumentsDone(_WithinItem, tag="response.function_call_arguments.done", kw_only=True):
    """A call's arguments have ended."""

    name: Annotated[str, about("The function's name.")]
    arguments: Annotated[str, about("The whole JSON, as the model wrote it.")]


ResponseEvent = (
    ResponseCreated
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | OutputItemAdded
    | OutputItemDone
    | ContentPartAdded
    | ContentPartDone
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | CallArgumentsDelta
    | CallArgumentsDone
)
