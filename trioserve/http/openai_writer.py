"""What the streams of both OpenAI endpoints have in common: usage, and when there is an event."""

from __future__ import annotations

import abc
from typing import Any

import attrs
from msgspec import UNSET, UnsetType

from trioserve.generation import GenerationStream, Usage
from trioserve.http.generations import total_usage
from trioserve.http.openai_schemas import PromptTokensDetails, UsageReply
from trioserve.http.sse import event
from trioserve.stream import Chunk

__all__ = ["MIN_LOGPROB", "OpenAIWriter", "says_nothing", "usage_reply"]

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


@attrs.define(eq=False, kw_only=True)
class OpenAIWriter(abc.ABC):
    """The events of one streamed response. With ``include_usage`` every event has a usage: null,
    but for the last, which has no choices."""

    id: str
    model: str
    created: int
    include_usage: bool

    def end(self, streams: list[GenerationStream]) -> bytes:
        """The usage of all prompts, where it was asked for."""
        if not self.include_usage:
            return b""
        return self._event([], usage_reply(total_usage(stream.usage for stream in streams)))

    @abc.abstractmethod
    def _response(self, choices: Any, usage: UsageReply | UnsetType | None) -> Any:
        """The body of one event."""

    def _event(self, choices: Any, usage: UsageReply | UnsetType | None = UNSET) -> bytes:
        if self.include_usage and usage is UNSET:
            usage = None
        return event(self._response(choices, usage))


def says_nothing(chunk: Chunk) -> bool:
    """Whether a step added no text yet and nothing else that an event would show."""
    return not chunk.text and chunk.finish_reason is None and not chunk.logprobs
