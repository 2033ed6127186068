"""The events of an OpenAI-compatible stream, and their reader."""

from __future__ import annotations

from typing import Any

import attrs
import msgspec

from trioserve.load.records import Record


class EventDelta(msgspec.Struct, gc=False):
    """The new part of a chat message in an event."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Other name of ``reasoning_content``; some servers send both."""


class EventChoice(msgspec.Struct, gc=False):
    """The part of an event that belongs to one output."""

    text: str | None = None
    token_ids: list[int] | None = None
    delta: EventDelta | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class EventUsage(msgspec.Struct, gc=False):
    """The token counts of a request."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class StreamEvent(msgspec.Struct, gc=False):
    """The data of an event."""

    choices: list[EventChoice] | None = None
    usage: EventUsage | None = None
    error: Any = None


DECODING_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors that decoding JSON from a server may raise."""

decode_event = msgspec.json.Decoder(StreamEvent).decode
"""Function that decodes an event's data. Raises :data:`DECODING_ERRORS`."""


def error_text(error: Any) -> str:
    """Return the text of a response's ``error``: an object with a message, or any other value."""
    return str(error.get("message", error) if isinstance(error, dict) else error)


@attrs.define(eq=False)
class AnswerEvents:
    """Reader of server-sent events into ``record``. It takes bytes in any pieces."""

    record: Record
    _rest: bytes = b""
    _texts: list[str] = attrs.field(factory=list)
    _reasonings: list[str] = attrs.field(factory=list)
    _done: bool = False

    @property
    def complete(self) -> bool:
        """True if the stream's end came: ``[DONE]``, or a finish reason."""
        return self._done or self.record.finish_reason is not None

    def feed(self, data: bytes, now: float) -> int:
        """Take bytes received at ``now``; return the number of events with a choice so far.

        Raises:
            msgspec.DecodeError: An event's data is malformed.
            UnicodeDecodeError: An event's data isn't UTF-8.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            # In this format an event has one line of data.
            if line.startswith(b"data:"):
                self._note(line[5:].strip(), now)
        return len(self.record.chunks)

    def close(self) -> None:
        """Store the text and reasoning so far in the record."""
        self.record.text = "".join(self._texts)
        self.record.reasoning = "".join(self._reasonings)

    def _note(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._done = True
            return
        event = decode_event(data)
        record = self.record
        if event.choices:
            choice = event.choices[0]
            record.chunks.append(now)
            delta = choice.delta
            text = choice.text if delta is None else delta.content
            if text:
                self._texts.append(text)
            reasoning = delta and (delta.reasoning_content or delta.reasoning)
            if reasoning:
                self._reasonings.append(reasoning)
            if record.first_text is None and (text or reasoning):
                record.first_text = now
            if choice.token_ids:
                record.token_ids += choice.token_ids
            if choice.finish_reason:
                record.finish_reason = choice.finish_reason
        if event.usage is not None:
            _note_usage(record, event.usage)
        if event.error is not None:
            record.fail("error in the stream", error_text(event.error))


def _note_usage(record: Record, usage: EventUsage) -> None:
    record.prompt_tokens = usage.prompt_tokens
    record.completion_tokens = usage.completion_tokens
    if usage.prompt_tokens_details is not None:
        record.cached_tokens = usage.prompt_tokens_details.cached_tokens
