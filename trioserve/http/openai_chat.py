"""What the engine gives, in the words of ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from msgspec import UNSET, UnsetType

from trioserve.generation import Completion, GenerationStream, Usage
from trioserve.http.generations import total_usage
from trioserve.http.openai_schemas import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionResponse,
    ChatLogprob,
    ChatLogprobs,
    Delta,
    PromptTokensDetails,
    TopLogprob,
    UsageReply,
)
from trioserve.http.sse import event
from trioserve.stream import Chunk, TokenLogprob
from trioserve.tokenizer import Tokenizer

__all__ = ["MIN_LOGPROB", "ChatWriter", "chat_response", "usage_reply"]

MIN_LOGPROB = -9999.0
"""What stands for the logarithm of zero, which JSON can't say."""


def usage_reply(usage: Usage) -> UsageReply:
    """Usage as the OpenAI API has it."""
    return UsageReply(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
    )


def chat_response(
    completion: Completion, *, model: str, created: int, tokenizer: Tokenizer
) -> ChatCompletionResponse:
    """The whole answer."""
    choice = ChatChoice(
        index=0,
        message=AssistantMessage(content=completion.text),
        logprobs=_chat_logprobs(completion.logprobs, tokenizer),
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
    )
    return ChatCompletionResponse(
        id=completion.request_id,
        created=created,
        model=model,
        choices=[choice],
        usage=usage_reply(completion.usage),
    )


def _chat_logprobs(
    entries: Sequence[TokenLogprob] | None, tokenizer: Tokenizer
) -> ChatLogprobs | None:
    if entries is None:
        return None
    return ChatLogprobs([_chat_logprob(entry, tokenizer) for entry in entries])


def _chat_logprob(entry: TokenLogprob, tokenizer: Tokenizer) -> ChatLogprob:
    return ChatLogprob(
        token=entry.text,
        logprob=max(entry.logprob, MIN_LOGPROB),
        bytes=list(tokenizer.token_bytes(entry.token_id)),
        top_logprobs=[
            TopLogprob(
                token=text,
                logprob=max(logprob, MIN_LOGPROB),
                bytes=list(tokenizer.token_bytes(token_id)),
            )
            for token_id, logprob, text in entry.top
        ],
    )


@attrs.define(eq=False, kw_only=True)
class ChatWriter:
    """The events of a streamed chat completion."""

    id: str
    model: str
    created: int
    tokenizer: Tokenizer
    include_usage: bool

    def start(self, streams: list[GenerationStream]) -> bytes:
        """A chunk that only says who speaks."""
        return self._event([ChatChunkChoice(0, Delta(role="assistant", content=""))])

    def chunk(self, index: int, chunk: Chunk) -> bytes:
        """A chunk; none where a step added no text yet and nothing else."""
        if not chunk.text and chunk.finish_reason is None and not chunk.logprobs:
            return b""
        choice = ChatChunkChoice(
            index,
            Delta(content=chunk.text),
            logprobs=_chat_logprobs(chunk.logprobs, self.tokenizer),
            finish_reason=chunk.finish_reason,
        )
        if chunk.finish_reason is not None:
            choice.stop_reason = chunk.stop_reason
        return self._event([choice])

    def end(self, streams: list[GenerationStream]) -> bytes:
        """The usage, where it was asked for."""
        if not self.include_usage:
            return b""
        return self._event([], usage_reply(total_usage(stream.usage for stream in streams)))

    def _event(
        self, choices: list[ChatChunkChoice], usage: UsageReply | UnsetType | None = UNSET
    ) -> bytes:
        if self.include_usage and usage is UNSET:
            usage = None
        return event(
            ChatCompletionChunk(
                id=self.id, created=self.created, model=self.model, choices=choices, usage=usage
            )
        )
