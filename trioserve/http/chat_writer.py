"""What the engine gives, in the words of ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from msgspec import UnsetType

from trioserve.generation import Completion, GenerationStream
from trioserve.http.chat_schemas import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionResponse,
    ChatLogprob,
    ChatLogprobs,
    Delta,
    TopLogprob,
)
from trioserve.http.openai_schemas import UsageReply
from trioserve.http.openai_writer import MIN_LOGPROB, OpenAIWriter, says_nothing, usage_reply
from trioserve.stream import Chunk, TokenLogprob
from trioserve.tokenizer import Tokenizer

__all__ = ["ChatWriter", "chat_response"]


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
class ChatWriter(OpenAIWriter):
    """The events of a streamed chat completion."""

    tokenizer: Tokenizer

    def start(self, streams: list[GenerationStream]) -> bytes:
        """A chunk that only says who speaks."""
        super().start(streams)
        return self._event([ChatChunkChoice(0, Delta(role="assistant", content=""))])

    def chunk(self, index: int, chunk: Chunk) -> bytes:
        """A chunk; none where a step added no text yet and nothing else."""
        if says_nothing(chunk):
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

    def _response(
        self, choices: list[ChatChunkChoice], usage: UsageReply | UnsetType | None
    ) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=usage
        )
