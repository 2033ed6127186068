"""The work of a run: conversations of one or more turns, independent of the target.

A :class:`Conversation` is sent turn by turn. Each request has the whole history, with the actual
answers. Most data sets have conversations of one turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

Form = Callable[[str], bool]
"""Function that returns True if an answer's text has the requested form."""


@attrs.frozen(kw_only=True)
class Cancel:
    """A client's disconnect: a number of seconds after sending, or after a number of events."""

    seconds: float | None = None
    events: int | None = None


@attrs.frozen(kw_only=True)
class Turn:
    """One request of a conversation.

    Its new part is either ``prompt`` (text or token ids) or ``messages`` (of a chat). ``fields``
    are further fields of the body; they may also be the whole request.
    """

    prompt: str | tuple[int, ...] | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    max_tokens: int | None = None
    fields: Mapping[str, Any] = attrs.field(factory=dict)
    pause: float = 0.0
    """Seconds between the previous answer and this request."""
    cancel: Cancel | None = None
    form: Form | None = None


@attrs.frozen(kw_only=True)
class Conversation:
    """Turns that are sent one after the other, until one fails or is cancelled."""

    turns: tuple[Turn, ...]


def single(fields: Mapping[str, Any]) -> Conversation:
    """Return a conversation of one request with the body ``fields``."""
    return Conversation(turns=(Turn(fields=fields),))


def request_fields(
    conversation: Conversation, turn: int, answers: Sequence[str], *, chat: bool
) -> dict[str, Any]:
    """Return the fields of the body of one request.

    Args:
        conversation: The conversation.
        turn: Index of the turn, from 0.
        answers: Answers to the turns before it.
        chat: True for a chat endpoint. Other endpoints get the history as one text.

    Raises:
        ValueError: A message is malformed; or the endpoint doesn't take such token ids, or a
            message without text.
    """
    current = conversation.turns[turn]
    fields: dict[str, Any] = {}
    if current.max_tokens is not None:
        fields["max_tokens"] = current.max_tokens
    if current.prompt is not None or current.messages is not None:
        history = conversation.turns[: turn + 1]
        if chat:
            fields["messages"] = _messages(history, answers)
        else:
            fields["prompt"] = _prompt(history, answers)
    return {**fields, **current.fields}


def _messages(history: Sequence[Turn], answers: Sequence[str]) -> list[Mapping[str, Any]]:
    messages: list[Mapping[str, Any]] = []
    for number, turn in enumerate(history):
        if number:
            messages.append({"role": "assistant", "content": answers[number - 1]})
        if turn.messages is not None:
            messages += map(_message, turn.messages)
        elif isinstance(turn.prompt, str):
            messages.append({"role": "user", "content": turn.prompt})
        else:
            raise ValueError("token ids can be sent to /v1/completions only")
    return messages


def _prompt(history: Sequence[Turn], answers: Sequence[str]) -> str | list[int]:
    if len(history) == 1 and isinstance(history[0].prompt, tuple):
        return list(history[0].prompt)
    parts: list[str] = []
    for number, turn in enumerate(history):
        if number:
            parts.append(answers[number - 1])
        if isinstance(turn.prompt, str):
            parts.append(turn.prompt)
        elif turn.messages is not None:
            parts += [_content(_message(message)) for message in turn.messages]
        else:
            raise ValueError("a history of token ids can't be joined with texts")
    return "\n\n".join(parts)


def _message(given: Any) -> Mapping[str, Any]:
    """Return ``given`` if it is a message. Files may have other values there."""
    if not isinstance(given, Mapping) or not isinstance(given.get("role"), str):
        raise ValueError(f"a message must be an object with a role; got {str(given)[:60]!r}")
    return given


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        raise ValueError("a message with no text can be sent to a chat endpoint only")
    return content
