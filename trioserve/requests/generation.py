"""A caller's view of a request: its stream of chunks, its usage, its whole output."""

from __future__ import annotations

import operator
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import trio

from trioserve.protocol.errors import InvalidRequest
from trioserve.protocol.reports import CONTEXT_LOGITS, GENERATION_LOGITS, HIDDEN_STATES
from trioserve.protocol.sampling import SamplingParams
from trioserve.requests.embedded import EmbeddingsPrompt
from trioserve.requests.logprobs import PromptLogprobs
from trioserve.requests.prompts import ChatPrompt, Prompt, TextPrompt, TokensPrompt
from trioserve.requests.request import FinishReason, Request, Times
from trioserve.requests.stream import Chunk, TokenLogprob
from trioserve.requests.tensors import PROMPT_STATES, Arrays, Floats

_WHOLE = (FinishReason.STOP, FinishReason.LENGTH)

PromptLike = str | Sequence[int] | Sequence[Mapping[str, Any]] | Prompt


@attrs.frozen
class Usage:
    """Tokens of one request so far."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    draft_tokens: int = 0
    """Tokens that were drafted and verified; completion_tokens doesn't count those refused."""
    accepted_draft_tokens: int = 0
    image_tokens: int = 0
    """Tokens of the prompt whose embeddings come from images, and from frames of videos."""
    audio_tokens: int = 0
    """Tokens of the prompt whose embeddings come from audio clips."""

    def __add__(self, other: Usage) -> Usage:
        """Return the tokens of both."""
        return Usage(*map(operator.add, attrs.astuple(self), attrs.astuple(other)))

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@attrs.frozen
class Output:
    """One of the outputs of a request that has ended."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: int | str | None
    logprobs: tuple[TokenLogprob, ...] | None
    beam_logprob: float | None = None
    """The sum of the log-probabilities of a beam's tokens."""
    tensors: Arrays = attrs.field(factory=dict, eq=False)
    """Its arrays of :mod:`trioserve.requests.tensors`, by name, where asked for."""

    @property
    def hidden_states(self) -> Floats | None:
        """The hidden states [G, E] that its tokens were drawn from, where asked for."""
        return self.tensors.get(HIDDEN_STATES)

    @property
    def generation_logits(self) -> Floats | None:
        """The raw logits [G, V] that its tokens were drawn from, where asked for."""
        return self.tensors.get(GENERATION_LOGITS)

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of its tokens' log-probabilities.

        It is None where they weren't asked for, except for an output of a beam search.
        """
        if self.beam_logprob is not None:
            return self.beam_logprob
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability of its tokens, which must have been asked for."""
        assert self.logprobs is not None
        assert self.cumulative_logprob is not None
        return self.cumulative_logprob / max(len(self.logprobs), 1)


@attrs.frozen
class Completion:
    """The whole of one request: ``outputs`` has one entry for each of the ``n`` asked for."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: PromptLogprobs | None
    outputs: tuple[Output, ...]
    usage: Usage
    tensors: Arrays = attrs.field(factory=dict, eq=False)
    """The prompt's arrays of :mod:`trioserve.requests.tensors`, by name, where asked for."""

    @property
    def prompt_hidden_states(self) -> Floats | None:
        """The hidden states [P, E] of the prompt's tokens, where asked for."""
        return self.tensors.get(PROMPT_STATES)

    @property
    def context_logits(self) -> Floats | None:
        """The raw logits [P, V] behind the prompt's tokens, where asked for."""
        return self.tensors.get(CONTEXT_LOGITS)

    @property
    def text(self) -> str:
        """The first output's text."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first output's tokens."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str:
        """Why the first output ended."""
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        """The stop id or stop string that ended the first output."""
        return self.outputs[0].stop_reason

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """The first output's log-probabilities."""
        return self.outputs[0].logprobs

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the first output's log-probabilities; None where they weren't asked for."""
        return self.outputs[0].cumulative_logprob


@attrs.define(eq=False)
class GenerationStream:
    """The output of one running request: an async iterator of chunks. One task reads it."""

    _request: Request
    _taken: list[Chunk] = attrs.field(factory=list)
    _completion_tokens: int = 0
    is_complete: bool = attrs.field(init=False, default=False)
    """True once all of a single output has been handed out, unless it was ended early."""
    before_complete: Callable[[list[int]], Awaitable[None]] | None = attrs.field(
        init=False, default=None
    )
    """Called with all tokens before :attr:`is_complete` is set and the last chunk is handed out."""

    @property
    def request(self) -> Request:
        """The request of this output."""
        return self._request

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens of the first output that have been handed out."""
        return self._request.sequences[0].output_ids[: self._completion_tokens]

    @property
    def request_id(self) -> str:
        """The id the request was given or chose."""
        return self._request.id

    @property
    def times(self) -> Times:
        """The times of its stages so far, in seconds on trio's clock."""
        return self._request.times

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt as the model sees it, without the virtual tokens of a prompt adapter."""
        return self._request.own_prompt_ids

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """Log-probabilities of the prompt, where asked for: complete once a chunk was read."""
        return self._request.prompt_logprobs

    @property
    def prompt_tensors(self) -> Arrays:
        """Hidden states and logits of the prompt, by name: complete once a chunk was read.

        Virtual tokens of a prompt adapter have none.
        """
        tensors, skipped = self._request.tensors, self._request.num_virtual_tokens
        found = {} if tensors is None else tensors.of_prompt()
        return {name: rows[skipped:] for name, rows in found.items()}

    @property
    def num_tensor_bytes(self) -> int:
        """Bytes of the hidden states and logits that have come."""
        tensors = self._request.tensors
        return 0 if tensors is None else tensors.num_bytes_so_far

    def output_tensors(self, index: int, num_tokens: int) -> Arrays:
        """Return the hidden states and logits of output ``index``, by name.

        They are complete once its last chunk was read; it has ``num_tokens`` tokens.
        """
        tensors = self._request.tensors
        return {} if tensors is None else tensors.of_output(index, num_tokens)

    @property
    def usage(self) -> Usage:
        """The tokens so far: of the prompt, and of the chunks that this stream has handed out.

        Virtual tokens of a prompt adapter don't count.
        """
        num_virtual = self._request.num_virtual_tokens
        return Usage(
            prompt_tokens=len(self._request.prompt_ids) - num_virtual,
            completion_tokens=self._completion_tokens,
            cached_tokens=max(self._request.num_cached_tokens - num_virtual, 0),
            draft_tokens=sum(each.num_draft_tokens for each in self._request.sequences),
            accepted_draft_tokens=sum(each.num_accepted_drafts for each in self._request.sequences),
            image_tokens=self._media_tokens("image", "video"),
            audio_tokens=self._media_tokens("audio"),
        )

    def _media_tokens(self, *kinds: str) -> int:
        spans = self._request.embedded
        return sum(span.stop - span.start for span in spans if span.kind in kinds)

    def __aiter__(self) -> GenerationStream:
        return self

    async def __anext__(self) -> Chunk:
        try:
            return await self.receive()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None

    def offer_to(self, sink: Callable[[Chunk], bool]) -> None:
        """Offer each chunk that comes while :meth:`receive` waits to ``sink`` first.

        If it returns True it has taken the chunk, and :meth:`receive` goes on waiting. It is called
        by the engine and not by the task that waits, and mustn't take long; if it raises, that is
        the end of this stream. A last chunk isn't offered.
        """

        def offer(chunk: Chunk) -> bool:
            if not sink(chunk):
                return False
            self._completion_tokens += len(chunk.token_ids)
            return True

        self._request.stream.sink = offer

    async def receive(self) -> Chunk:
        """Return the next chunk: everything that came for one sequence since the last one.

        Cancelling it loses nothing.

        Raises:
            trio.EndOfChannel: the final chunk has been handed out.
            SlowReader: this reader fell behind too far.
            RequestAborted: the request was ended, and not by the caller.
            EngineError: the engine failed.
            trio.ClosedResourceError: the block was left before the final chunk was read.
        """
        if not self._taken:
            self._taken = await self._request.stream.take()
        else:
            await trio.lowlevel.checkpoint()
        chunk = self._taken[0]
        num_tokens = self._completion_tokens + len(chunk.token_ids)
        is_complete = chunk.finish_reason in _WHOLE
        if is_complete and self.before_complete is not None:
            await self.before_complete(self._request.sequences[0].output_ids[:num_tokens])
        del self._taken[0]
        self._completion_tokens, self.is_complete = num_tokens, is_complete
        return chunk


def as_prompt(prompt: PromptLike) -> Prompt:
    """Return ``prompt`` as an instance of its prompt class.

    Raises:
        InvalidRequest: it is empty, or a list of something else than ids or messages.
    """
    if isinstance(prompt, (TextPrompt, TokensPrompt, ChatPrompt, EmbeddingsPrompt)):
        return prompt
    if isinstance(prompt, str):
        return TextPrompt(prompt)
    if isinstance(prompt, (bytes, bytearray, memoryview)) or not isinstance(prompt, Sequence):
        raise _not_a_prompt()
    items = list(prompt)
    if not items:
        raise InvalidRequest("the prompt is empty", param="prompt")
    if all(isinstance(item, Mapping) for item in items):
        return ChatPrompt(messages=tuple(dict(item) for item in items))  # type: ignore[call-overload]
    if all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        return TokensPrompt(tuple(items))  # type: ignore[arg-type]
    raise _not_a_prompt()


def _not_a_prompt() -> InvalidRequest:
    return InvalidRequest(
        "a prompt is text, a list of token ids or a list of messages", param="prompt"
    )


def sampling_params(fields: Mapping[str, Any]) -> SamplingParams:
    """Return sampling parameters with the fields given by name.

    Raises:
        InvalidRequest: a name or a value is wrong; ``param`` names it.
    """
    known = {field.name for field in attrs.fields(SamplingParams)}
    for name in fields:
        if name not in known:
            raise InvalidRequest(f"there is no sampling parameter {name!r}", param=name)
    return SamplingParams(**fields)


def completion_of(stream: GenerationStream, chunks: Iterable[Chunk]) -> Completion:
    """Return all chunks of a stream that has ended, as one completion."""
    by_index: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        by_index.setdefault(chunk.index, []).append(chunk)
    return Completion(
        request_id=stream.request_id,
        prompt_token_ids=tuple(stream.prompt_token_ids),
        prompt_logprobs=stream.prompt_logprobs,
        outputs=tuple(_output(stream, index, own) for index, own in sorted(by_index.items())),
        usage=stream.usage,
        tensors=stream.prompt_tensors,
    )


def _output(stream: GenerationStream, index: int, chunks: list[Chunk]) -> Output:
    last = chunks[-1]
    assert last.finish_reason is not None
    logprobs = [entry for chunk in chunks for entry in chunk.logprobs or ()]
    token_ids = tuple(token for chunk in chunks for token in chunk.token_ids)
    return Output(
        index=index,
        text="".join(chunk.text for chunk in chunks),
        token_ids=token_ids,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        logprobs=tuple(logprobs) if any(chunk.logprobs is not None for chunk in chunks) else None,
        beam_logprob=last.beam_logprob,
        tensors=stream.output_tensors(index, len(token_ids)),
    )
