"""The task that turns tokens into text and decides how each output ends.

The finish rule
---------------
An output may end by a stop string, a stop id, its length or an abort. If several of these apply to
the tokens of one step, the earliest token decides:

- a *stop string* or *stop regex* ends the output at the token that completes it;
- a *stop id* ends it at that token. Its text isn't searched for stop strings and is left out unless
  ``include_stop_str_in_output`` is set; the id is always among the token ids;
- the *length* ends it at the last token, unless this token completes a stop string or regex;
- an *abort* comes after every token.

The text, the token ids, the log-probabilities and the usage end there. Token ids and
log-probabilities are sent with their step. Text is held back while it may begin a stop string or is
part of a character. Tokens are processed one by one, so nothing past the end is sent.

The scheduler doesn't see text, so a stop string calls its ``abort``. Tokens in flight for the
sequence still arrive and are dropped.

The outputs of a request end independently, but an error in one fails the request and aborts the
others.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import trio

from trioserve.protocol.errors import EngineError, InvalidRequest, SlowReader
from trioserve.protocol.sampling import SamplingParams
from trioserve.requests.request import Finish, FinishReason, Request, Sequence, SequenceOutput
from trioserve.requests.stream import Chunk
from trioserve.text.incremental import IncrementalDecoder, NoText
from trioserve.text.stop_regex import RegexStopMatcher, SearchBudget
from trioserve.text.stop_strings import StopMatcher
from trioserve.text.tokenizer import Tokenizer

_TURN = 256
"""Outputs delivered before other tasks run, because a delivery may write to a socket."""
_TOKENS_A_CHARACTER = 4
"""The most tokens of one character: its bytes in UTF-8."""
_SEARCHED = 16
"""Outputs that one with a stop regex counts as, because it may take milliseconds."""


@attrs.define(eq=False)
class SequenceText:
    """The text of one sequence so far, without I/O."""

    _decoder: IncrementalDecoder
    _matcher: StopMatcher | RegexStopMatcher | None
    _min_tokens: int
    _include_stop: bool
    _num_tokens: int = 0
    """Tokens taken so far, counted up to ``min_tokens``."""

    @classmethod
    def all_of(cls, request: Request, tokenizer: Tokenizer) -> list[SequenceText]:
        """Return a :class:`SequenceText` for each sequence of ``request``."""
        params = request.params
        budget = SearchBudget()

        def decoder() -> IncrementalDecoder:
            if not params.detokenize:
                return NoText()
            return tokenizer.incremental_decoder(
                request.own_prompt_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )

        return [
            cls(
                decoder(),
                _matcher_of(params, budget),
                params.min_tokens,
                params.include_stop_str_in_output,
            )
            for _ in request.sequences
        ]

    def take(
        self, token_ids: tuple[int, ...], finish: Finish | None
    ) -> tuple[str, int, Finish | None]:
        """Take the tokens of a step.

        Returns:
            The text that may be sent, the number of tokens that belong to the output, and the end
            of the output; None if it goes on.

        Raises:
            InvalidRequest: A stop regex takes too long.
        """
        if finish is None and self._matcher is None:
            push = self._decoder.push
            if len(token_ids) == 1:
                return push(token_ids[0]), 1, None
            return "".join(map(push, token_ids)), len(token_ids), None
        at_stop_id = bool(token_ids) and finish is not None and _is_by_id(finish)
        parts: list[str] = []
        for position, token_id in enumerate(token_ids[:-1] if at_stop_id else token_ids, 1):
            text = self._decoder.push(token_id)
            self._num_tokens += 1
            stop = self._match(text, parts)
            if stop is not None:
                return "".join(parts), position, _stopped(stop, finish)
        if finish is not None:
            stop = self._end(token_ids[-1] if at_stop_id else None, parts)
            if stop is not None:
                finish = _stopped(stop, finish)
        return "".join(parts), len(token_ids), finish

    def _match(self, text: str, parts: list[str]) -> str | None:
        """Append the sendable part of ``text`` to ``parts``; return the stop string found."""
        if self._matcher is None:
            parts.append(text)
            return None
        armed = self._num_tokens >= self._min_tokens
        sendable, stop = self._matcher.feed(text, armed=armed)
        parts.append(sendable)
        return stop

    def _end(self, stop_id: int | None, parts: list[str]) -> str | None:
        """Append the remaining text to ``parts``; return the stop string that it completes."""
        if stop_id is None:
            stop = self._match(self._decoder.flush(), parts)
            if stop is not None:
                return stop
        held = self._matcher.flush() if self._matcher is not None else ""
        parts.append(held)
        if stop_id is not None:
            if self._include_stop:
                parts.append(self._decoder.push(stop_id))
            parts.append(self._decoder.flush())
        return None


def stop_string_at_end(tokenizer: Tokenizer, request: Request, output_ids: list[int]) -> str | None:
    """Return the stop string of ``request`` that the last token of an output completes, if any.

    Only so many of the last tokens are turned into text as a stop string can have.
    """
    params = request.params
    longest = max(map(len, params.stop), default=0)
    start = max(len(output_ids) - _TOKENS_A_CHARACTER * (longest + 1), 0)
    decoder = tokenizer.incremental_decoder(
        request.own_prompt_ids + output_ids[:start],
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
    )
    matcher = StopMatcher(params.stop)
    text = SequenceText(decoder, matcher, params.min_tokens, include_stop=False, num_tokens=start)
    _, _, finish = text.take(tuple(output_ids[start:]), None)
    return None if finish is None else str(finish.stop_reason)


def _is_by_id(finish: Finish) -> bool:
    """Return True for the end of an output by a stop id, which is its last token."""
    return finish.reason is FinishReason.STOP and not isinstance(finish.stop_reason, str)


def _stopped(stop: str, finish: Finish | None) -> Finish:
    """Return the end of an output by a stop string; without it, it might end by ``finish``."""
    score = None if finish is None else finish.beam_logprob
    return Finish(FinishReason.STOP, stop_reason=stop, beam_logprob=score)


def _matcher_of(
    params: SamplingParams, budget: SearchBudget
) -> StopMatcher | RegexStopMatcher | None:
    include = params.include_stop_str_in_output
    if params.stop_regex:
        return RegexStopMatcher(params.stop, params.stop_regex, budget, include=include)
    return StopMatcher(params.stop, include=include) if params.stop else None


class Detokenizer:
    """Task that delivers the scheduler's outputs to the requests' streams.

    Args:
        tokenizer: The model's tokenizer.
        abort: The scheduler's method; called when an output ends by its text.
        on_delivered: Called once for each sequence, after its last chunk or error.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        abort: Callable[[Sequence, Finish], None],
        on_delivered: Callable[[Sequence, Finish], None],
    ) -> None:
        self._tokenizer = tokenizer
        self._abort = abort
        self._on_delivered = on_delivered

    async def run(self, outputs: trio.MemoryReceiveChannel[list[SequenceOutput]]) -> None:
        """Deliver every output until ``outputs`` is closed.

        An error of one output ends its request with an :class:`EngineError`; the task goes on.
        """
        async for batch in outputs:
            delivered = 0
            for output in batch:
                if delivered >= _TURN:
                    await trio.lowlevel.cancel_shielded_checkpoint()
                    delivered = 0
                delivered += _SEARCHED if output.sequence.request.params.stop_regex else 1
                try:
                    self.deliver(output)
                except Exception as cause:
                    error = EngineError("the output can't be turned into text")
                    error.__cause__ = cause
                    self._fail(output.sequence, error)

    def deliver(self, output: SequenceOutput) -> None:
        """Deliver one step's tokens of one sequence, unless the sequence has ended already."""
        sequence = output.sequence
        if sequence.delivered:
            return
        if sequence.delivery is None:
            self._open(sequence.request)
        try:
            text, num_tokens, finish = sequence.delivery.take(output.token_ids, output.finish)
        except InvalidRequest as refusal:
            self._fail(sequence, refusal)
            return
        token_ids, logprobs = output.token_ids[:num_tokens], output.logprobs
        if logprobs is not None and sequence.request.params.detokenize:
            logprobs = tuple(map(self._tokenizer.with_texts, logprobs[:num_tokens]))
        error = None if finish is None else _error_of(finish)
        chunk: Chunk | None = None
        if finish is not None and error is None:
            chunk = Chunk(
                *(text, token_ids, sequence.index, logprobs),
                *(finish.reason.value, finish.stop_reason, finish.beam_logprob),
            )
        elif token_ids or text:
            chunk = Chunk(text, token_ids, sequence.index, logprobs)
        try:
            if chunk is not None:
                sequence.request.stream.push(chunk)
        except SlowReader as slow:
            self._fail(sequence, slow)
            return
        if finish is None:
            return
        if finish is not output.finish:
            self._abort(sequence, finish)
        self._close(sequence, finish, error)
        if error is not None:
            self._fail(sequence, error)

    def _open(self, request: Request) -> None:
        texts = SequenceText.all_of(request, self._tokenizer)
        for sequence, text in zip(request.sequences, texts, strict=True):
            sequence.delivery = text

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        """End the rest of the request with ``error`` and abort its sequences."""
        finish = Finish(FinishReason.ABORT, error=error)
        for sibling in sequence.request.sequences:
            if not sibling.delivered:
                self._abort(sibling, finish)
                self._close(sibling, finish, error)

    def _close(self, sequence: Sequence, finish: Finish, error: Exception | None) -> None:
        sequence.delivered = True
        sequence.delivery = None
        request = sequence.request
        if error is not None or all(sibling.delivered for sibling in request.sequences):
            request.stream.close(error)
        self._on_delivered(sequence, finish)


def _error_of(finish: Finish) -> Exception | None:
    """Return the error that the stream raises in place of a final chunk."""
    if finish.error is None and finish.reason is FinishReason.ERROR:
        return EngineError("the engine failed while it computed this request")
    return finish.error
