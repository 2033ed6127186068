"""Parts of answers that chats and completions share: usage, the prompt's log-probabilities."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import msgspec
from msgspec import UNSET, UnsetType

from trioserve.http.api.generations import total_usage
from trioserve.http.api.openai.schemas import (
    CompletionTokensDetails,
    PromptLogprobReply,
    PromptTokensDetails,
    UsageReply,
)
from trioserve.http.api.sse import event
from trioserve.requests.generation import GenerationStream, Usage
from trioserve.requests.logprobs import PromptLogprobs
from trioserve.requests.stream import Chunk
from trioserve.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0
"""Number in place of the logarithm of zero, which JSON can't represent."""


def usage_reply(usage: Usage, reasoning_tokens: int | None = None) -> UsageReply:
    """Return usage in the OpenAI API's form; ``reasoning_tokens`` are included if known.

    OpenAI drafts from a request's ``prediction``. Here a draft counts wherever it comes from.
    """
    reply = UsageReply(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=usage.cached_tokens,
            image_tokens=usage.image_tokens or UNSET,
            audio_tokens=usage.audio_tokens or UNSET,
        ),
    )
    if reasoning_tokens is not None or usage.draft_tokens:
        reply.completion_tokens_details = CompletionTokensDetails(
            reasoning_tokens=reasoning_tokens or 0,
            accepted_prediction_tokens=usage.accepted_draft_tokens,
            rejected_prediction_tokens=usage.draft_tokens - usage.accepted_draft_tokens,
        )
    return reply


def unset_if_none(value: float | None) -> float | UnsetType:
    """Return ``value``, or what leaves its field out."""
    return UNSET if value is None else value


def matched_stop(
    stop_reason: int | str | None, token_ids: Sequence[int], eos_token_ids: Sequence[int]
) -> int | str | None:
    """Return the stop string or token that ended an output, the model's own end among them."""
    if stop_reason is None and token_ids and token_ids[-1] in eos_token_ids:
        return token_ids[-1]
    return stop_reason


def token_name(token_id: int, tokenizer: Tokenizer, *, as_id: bool) -> str:
    """Return a token's name in log-probabilities: its text or, if asked for, ``token_id:123``."""
    return f"token_id:{token_id}" if as_id else tokenizer.token_text(token_id)


def prompt_logprobs_reply(
    found: PromptLogprobs,
    prompt_ids: Sequence[int],
    tokenizer: Tokenizer,
    *,
    num_top: int,
) -> list[dict[str, PromptLogprobReply] | None]:
    """Return a prompt's log-probabilities in vLLM's form: a map for each token, by token ids.

    The token itself comes first, then the ``num_top`` most probable ones and the ones asked for by
    id, without a known rank. The first token has null, because nothing comes before it.
    """
    replies: list[dict[str, PromptLogprobReply] | None] = [None] * found.start
    text = tokenizer.token_text
    for entry in found.entries(list(prompt_ids)):
        own = PromptLogprobReply(max(entry.logprob, MIN_LOGPROB), entry.rank, text(entry.token_id))
        reply = {str(entry.token_id): own}
        for rank, (id, logprob, _) in enumerate(entry.top[:num_top], 1):
            if id != entry.token_id:
                reply[str(id)] = PromptLogprobReply(max(logprob, MIN_LOGPROB), rank, text(id))
        for id, logprob, _ in entry.asked:
            if str(id) not in reply:
                reply[str(id)] = PromptLogprobReply(max(logprob, MIN_LOGPROB), None, text(id))
        replies.append(reply)
    return replies


_MARK = "\0"
"""Placeholder of the text while the rest of an event is prepared."""
_ENCODED_MARK = b'"\\u0000"'
_encode = msgspec.json.Encoder().encode


@attrs.frozen
class TextEvent:
    """An event in which only a text changes, encoded except for the text."""

    _before: bytes
    _after: bytes

    @classmethod
    def of(cls, make_event: Callable[[str], bytes]) -> TextEvent:
        """Return the encoded event; ``make_event`` makes the event of a text, which is its last
        string.
        """
        # No other string ends in this: a quote in front of it would have a backslash before it.
        before, _, after = make_event(_MARK).rpartition(_ENCODED_MARK)
        return cls(before, after)

    def encoded(self, text: str) -> bytes:
        """Return the event of ``text``."""
        return self._before + _encode(text) + self._after


@attrs.define(eq=False, kw_only=True)
class OpenAIWriter(abc.ABC):
    """Events of one streamed response.

    With ``include_usage`` every event has a usage: null, except in the last one, which has no
    choices. With ``continuous_usage`` it is that of all outputs so far.
    """

    id: str
    model: str
    created: int
    include_usage: bool
    continuous_usage: bool = False
    _streams: list[GenerationStream] = attrs.field(factory=list, init=False)
    _text_events: dict[int, TextEvent] = attrs.field(factory=dict, init=False)
    """Events by choice, of choices that have begun and may add only text."""

    def start(self, streams: list[GenerationStream]) -> bytes:
        """Return nothing; overriding methods call it first."""
        self._streams = streams
        return b""

    def text(self, chunk: Chunk) -> bytes | None:
        """Return the event of a chunk that only adds text to the first prompt; None for others."""
        prepared = self._text_events.get(chunk.index)
        if prepared is None or chunk.logprobs is not None or chunk.finish_reason is not None:
            return None
        return prepared.encoded(chunk.text) if chunk.text else b""

    def end(self, streams: list[GenerationStream]) -> bytes:
        """Return the usage of all prompts, if it was asked for."""
        return self._event([], self._usage()) if self.include_usage else b""

    @abc.abstractmethod
    def _response(self, choices: Any, usage: UsageReply | UnsetType | None) -> Any:
        """Return the body of one event."""

    def _event(self, choices: Any, usage: UsageReply | UnsetType | None = UNSET) -> bytes:
        if usage is UNSET and self.continuous_usage:
            usage = self._usage()
        elif usage is UNSET and self.include_usage:
            usage = None
        return event(self._response(choices, usage))

    def _usage(self) -> UsageReply:
        return usage_reply(total_usage(stream.usage for stream in self._streams))


def says_nothing(chunk: Chunk, *, token_ids: bool = False) -> bool:
    """Return whether a step added no text yet and nothing else that an event would show.

    ``token_ids`` is true if events show those.
    """
    if token_ids and chunk.token_ids:
        return False
    return not chunk.text and chunk.finish_reason is None and not chunk.logprobs
