"""Answers of ``/v1/chat/completions``, whole or as events."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import attrs
from msgspec import UNSET, UnsetType

from trioserve.http.api.generations import total_usage
from trioserve.http.api.openai.chat.answer import AnswerReader, ReaderOptions
from trioserve.http.api.openai.chat.schemas import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionResponse,
    ChatLogprob,
    ChatLogprobs,
    Delta,
    TopLogprob,
)
from trioserve.http.api.openai.schemas import UsageReply
from trioserve.http.api.openai.writer import (
    MIN_LOGPROB,
    OpenAIWriter,
    TextEvent,
    matched_stop,
    prompt_logprobs_reply,
    token_name,
    unset_if_none,
    usage_reply,
)
from trioserve.requests.generation import Completion, GenerationStream, Output
from trioserve.requests.stream import Chunk, TokenLogprob
from trioserve.text.tokenizer import Tokenizer


@attrs.frozen(kw_only=True)
class WantedChat:
    """Parts of a chat completion that a request wants."""

    tokenizer: Tokenizer
    options: ReaderOptions
    n: int = 1
    role: str = "assistant"
    echo: str = ""
    """Text at the beginning of the content, before the answer."""
    eos_token_ids: Sequence[int] = ()
    top_logprobs: int | None = None
    """Number of most probable tokens; None for no log-probabilities."""
    asked_only: bool = False
    """True if tokens that were asked for by id replace the most probable ones."""
    prompt_logprobs: int | None = None
    token_ids: bool = False
    prompt_text: bool = False
    tokens_as_ids: bool = False

    def logprobs(self, entries: Sequence[TokenLogprob] | None) -> ChatLogprobs | None:
        """Return the log-probabilities of some tokens of an answer."""
        if entries is None or self.top_logprobs is None:
            return None
        return ChatLogprobs([self._logprob(entry) for entry in entries])

    def text_of(self, prompt_ids: Sequence[int]) -> str | UnsetType:
        """Return the prompt as text, if it was asked for."""
        if not self.prompt_text:
            return UNSET
        return self.tokenizer.decode(prompt_ids, skip_special_tokens=False)

    def matched_stop(self, end: Output | Chunk) -> int | str | None:
        """Return the match that ended an output, by its last piece or the whole of it."""
        if end.finish_reason != "stop":
            return None
        return matched_stop(end.stop_reason, end.token_ids, self.eos_token_ids)

    def _logprob(self, entry: TokenLogprob) -> ChatLogprob:
        if self.asked_only:
            others = {entry.token_id: entry.logprob}
        else:
            others = {id: logprob for id, logprob, _ in entry.top[: self.top_logprobs]}
        for id, logprob, _ in entry.asked:
            others.setdefault(id, logprob)
        return ChatLogprob(
            token=self._name(entry.token_id),
            logprob=max(entry.logprob, MIN_LOGPROB),
            bytes=list(self.tokenizer.token_bytes(entry.token_id)),
            top_logprobs=[
                TopLogprob(
                    token=self._name(id),
                    logprob=max(logprob, MIN_LOGPROB),
                    bytes=list(self.tokenizer.token_bytes(id)),
                )
                for id, logprob in others.items()
            ],
        )

    def _name(self, token_id: int) -> str:
        return token_name(token_id, self.tokenizer, as_id=self.tokens_as_ids)


def chat_response(
    completion: Completion, wanted: WantedChat, *, model: str, created: int
) -> ChatCompletionResponse:
    """Return the whole answer: a choice for each output."""
    ids = list(completion.prompt_token_ids)
    readers = [wanted.options.reader(ids) for _ in completion.outputs]
    choices = [
        _choice(output, reader, wanted)
        for output, reader in zip(completion.outputs, readers, strict=True)
    ]
    response = ChatCompletionResponse(
        id=completion.request_id,
        created=created,
        model=model,
        choices=choices,
        usage=usage_reply(completion.usage, _reasoning_tokens(readers)),
        prompt_token_ids=ids if wanted.token_ids else None,
        prompt_text=wanted.text_of(ids),
    )
    if wanted.prompt_logprobs is not None and completion.prompt_logprobs is not None:
        response.prompt_logprobs = prompt_logprobs_reply(
            completion.prompt_logprobs, ids, wanted.tokenizer, num_top=wanted.prompt_logprobs
        )
    return response


def _reasoning_tokens(readers: Sequence[AnswerReader]) -> int | None:
    """Return the tokens of reasoning in all answers; None if they can't be counted."""
    counts = [count for reader in readers if (count := reader.reasoning_tokens) is not None]
    return sum(counts) if counts else None


def _choice(output: Output, reader: AnswerReader, wanted: WantedChat) -> ChatChoice:
    message = reader.message(output.text, token_ids=output.token_ids, role=wanted.role)
    if wanted.echo:
        message.content = wanted.echo + (message.content or "")
    first = reader.num_left_out
    logprobs = None if output.logprobs is None else output.logprobs[first:]
    return ChatChoice(
        index=output.index,
        message=message,
        logprobs=wanted.logprobs(logprobs),
        finish_reason=_finish_reason(output.finish_reason, reader),
        stop_reason=output.stop_reason,
        matched_stop=wanted.matched_stop(output),
        token_ids=list(output.token_ids[first:]) if wanted.token_ids else UNSET,
        cumulative_logprob=unset_if_none(output.beam_logprob),
    )


def _finish_reason(reason: str, reader: AnswerReader) -> str:
    return reader.call_reason if reason == "stop" and reader.has_calls else reason


@attrs.define(eq=False, kw_only=True)
class ChatWriter(OpenAIWriter):
    """Events of a streamed chat completion."""

    wanted: WantedChat
    _readers: list[AnswerReader] = attrs.field(factory=list, init=False)
    _opening: Sequence[int] | None = attrs.field(default=None, init=False)
    """The prompt's ids, while its first event is made."""

    def start(self, streams: list[GenerationStream]) -> bytes:
        """Return for each answer an event with the role, and one with the echo."""
        super().start(streams)
        (stream,) = streams
        ids = stream.prompt_token_ids
        wanted = self.wanted
        self._readers = [wanted.options.reader(ids) for _ in range(wanted.n)]
        self._opening = ids
        events = []
        for index in range(wanted.n):
            events.append(self._delta(index, Delta(role=wanted.role, content="")))
            self._opening = None
            if wanted.echo:
                events.append(self._text(index, wanted.echo))
            plain = self._readers[index].plain and not wanted.token_ids
            if plain and not self.continuous_usage:
                self._text_events[index] = TextEvent.of(functools.partial(self._text, index))
        return b"".join(events)

    def chunk(self, index: int, chunk: Chunk) -> bytes:
        """Return a chunk's event; empty if a step added nothing to send yet."""
        if (event := self.text(chunk)) is not None:
            return event
        reader = self._readers[chunk.index]
        ended = chunk.finish_reason is not None
        left_out = reader.num_left_out
        delta = reader.feed(chunk.text, last=ended, token_ids=chunk.token_ids)
        first = reader.num_left_out - left_out
        token_ids = chunk.token_ids[first:]
        logprobs = self.wanted.logprobs(None if chunk.logprobs is None else chunk.logprobs[first:])
        told = self.wanted.token_ids and token_ids
        if not (ended or told or (logprobs and logprobs.content)) and delta == Delta():
            return b""
        choice = ChatChunkChoice(chunk.index, delta, logprobs=logprobs)
        if chunk.finish_reason is not None:
            choice.finish_reason = _finish_reason(chunk.finish_reason, reader)
            choice.stop_reason = chunk.stop_reason
            choice.matched_stop = self.wanted.matched_stop(chunk)
            choice.cumulative_logprob = unset_if_none(chunk.beam_logprob)
        if self.wanted.token_ids:
            choice.token_ids = list(token_ids)
        return self._event([choice])

    def _usage(self) -> UsageReply:
        usage = total_usage(stream.usage for stream in self._streams)
        return usage_reply(usage, _reasoning_tokens(self._readers))

    def _text(self, index: int, text: str) -> bytes:
        return self._delta(index, Delta(content=text))

    def _delta(self, index: int, delta: Delta) -> bytes:
        return self._event([ChatChunkChoice(index, delta)])

    def _response(
        self, choices: list[ChatChunkChoice], usage: UsageReply | UnsetType | None
    ) -> ChatCompletionChunk:
        response = ChatCompletionChunk(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=usage
        )
        if self._opening is not None:
            response.prompt_text = self.wanted.text_of(self._opening)
            if self.wanted.token_ids:
                response.prompt_token_ids = list(self._opening)
        return response
