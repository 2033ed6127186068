"""The back ends of ``trioserve chat``: an engine in this process, or a server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs
import msgspec

from trioserve.load.answer import (
    DECODING_ERRORS,
    EventChoice,
    EventDelta,
    EventUsage,
    decode_event,
    error_text,
)
from trioserve.load.remote import Remote, RemoteError, RemoteEvents
from trioserve.protocol.sampling import SamplingParams
from trioserve.requests.prompts import ChatPrompt

if TYPE_CHECKING:
    from trioserve.engine.engine import Engine
    from trioserve.requests.generation import GenerationStream

Messages = Sequence[dict[str, Any]]


@attrs.frozen(kw_only=True)
class Piece:
    """A part of a reply. A server's event counts as one token until the server sends its count."""

    text: str = ""
    reasoning: str = ""
    """Reasoning that the server sends apart from the reply."""
    num_tokens: int = 0
    finish_reason: str | None = None


class ChatReply(Protocol):
    """A reply in progress, an async iterator of pieces."""

    def __aiter__(self) -> AsyncIterator[Piece]: ...

    async def __anext__(self) -> Piece: ...

    @property
    def num_tokens(self) -> int | None:
        """Number of the reply's tokens; None if the back end doesn't count them."""

    @property
    def num_context_tokens(self) -> int | None:
        """Number of tokens of the conversation and the reply; None if unknown."""


class ChatBackend(Protocol):
    """A chat model, in this process or on a server."""

    @property
    def name(self) -> str:
        """Name of the model."""

    @property
    def max_model_len(self) -> int | None:
        """Longest conversation in tokens; None if unknown."""

    def reply(
        self, messages: Messages, fields: Mapping[str, Any]
    ) -> contextlib.AbstractAsyncContextManager[ChatReply]:
        """Open a reply to ``messages``, sampled by ``fields``. Leaving the block stops it.

        Raises:
            InvalidRequest: An engine refuses the request.
            RemoteError: A server refuses the request, or the connection is lost.
        """


@attrs.frozen
class EngineChatBackend:
    """Back end for an open engine."""

    engine: Engine

    @property
    def name(self) -> str:
        return self.engine.model_name

    @property
    def max_model_len(self) -> int | None:
        return self.engine.max_model_len

    @contextlib.asynccontextmanager
    async def reply(
        self, messages: Messages, fields: Mapping[str, Any]
    ) -> AsyncIterator[ChatReply]:
        params = SamplingParams(**{**self.engine.generation_defaults, **fields})
        async with self.engine.generate(ChatPrompt(messages=tuple(messages)), params) as stream:
            yield _EngineReply(stream)


@attrs.define(eq=False)
class _EngineReply:
    _stream: GenerationStream

    def __aiter__(self) -> _EngineReply:
        return self

    async def __anext__(self) -> Piece:
        chunk = await anext(self._stream)
        return Piece(
            text=chunk.text, num_tokens=len(chunk.token_ids), finish_reason=chunk.finish_reason
        )

    @property
    def num_tokens(self) -> int | None:
        return self._stream.usage.completion_tokens

    @property
    def num_context_tokens(self) -> int | None:
        return self._stream.usage.total_tokens


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _ModelList(msgspec.Struct):
    data: list[_Model]


async def find_server(remote: Remote, base_path: str, model: str | None) -> ServerChatBackend:
    """Return the back end for the server's model of that name, or for its first model.

    Raises:
        RemoteError: The server can't be reached, or has no such model.
    """
    answer = await remote.get(f"{base_path}/models")
    remote.check(answer)
    try:
        models = msgspec.json.decode(answer.body, type=_ModelList).data
    except DECODING_ERRORS as error:
        raise RemoteError(f"{remote.url} gives no list of models: {error}") from error
    for each in models:
        if model in (None, each.id):
            return ServerChatBackend(remote, base_path, each.id, each.max_model_len)
    names = ", ".join(each.id for each in models) or "none"
    raise RemoteError(
        f"{remote.url} lists no models"
        if model is None
        else f"{remote.url} has no model {model}; it has {names}"
    )


@attrs.frozen
class ServerChatBackend:
    """Back end for a model of an OpenAI-compatible server."""

    _remote: Remote
    _base_path: str
    name: str
    max_model_len: int | None

    @contextlib.asynccontextmanager
    async def reply(
        self, messages: Messages, fields: Mapping[str, Any]
    ) -> AsyncIterator[ChatReply]:
        body = {
            "model": self.name,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
        }
        async with self._remote.events(f"{self._base_path}/chat/completions", body) as events:
            yield _ServerReply(events)


@attrs.define(eq=False)
class _ServerReply:
    _events: RemoteEvents
    _usage: EventUsage | None = None

    def __aiter__(self) -> _ServerReply:
        return self

    async def __anext__(self) -> Piece:
        async for event in self._events:
            if event.data == b"[DONE]":
                break
            try:
                chunk = decode_event(event.data)
            except DECODING_ERRORS as error:
                raise RemoteError(f"the server's reply isn't understood: {error}") from error
            if chunk.error is not None:
                raise RemoteError(error_text(chunk.error))
            self._usage = chunk.usage or self._usage
            if chunk.choices:
                return _piece(chunk.choices[0])
        raise StopAsyncIteration

    @property
    def num_tokens(self) -> int | None:
        return None if self._usage is None else self._usage.completion_tokens

    @property
    def num_context_tokens(self) -> int | None:
        usage = self._usage
        if usage is None or usage.prompt_tokens is None or usage.completion_tokens is None:
            return None
        return usage.prompt_tokens + usage.completion_tokens


def _piece(choice: EventChoice) -> Piece:
    delta = choice.delta or EventDelta()
    text, reasoning = delta.content or "", delta.reasoning_content or delta.reasoning or ""
    return Piece(
        text=text,
        reasoning=reasoning,
        num_tokens=1 if text or reasoning else 0,
        finish_reason=choice.finish_reason,
    )
