"""Answers of ``/generate`` in SGLang's form, whole or as events of a stream."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs
import msgspec

from trioserve.http.api.openai.writer import MIN_LOGPROB, matched_stop
from trioserve.http.api.sglang.fields import NativeBatch
from trioserve.http.api.sglang.schemas import (
    GenerateResponse,
    MetaInfo,
    NativeFinish,
    NativeLogprob,
)
from trioserve.http.api.sglang.tensors import tensors_as_json
from trioserve.http.api.sse import event
from trioserve.requests.generation import Completion, GenerationStream, Usage
from trioserve.requests.logprobs import PromptLogprobs
from trioserve.requests.stream import Chunk, TokenLogprob
from trioserve.requests.tensors import Arrays
from trioserve.text.tokenizer import Tokenizer

_encoder = msgspec.json.Encoder()


@attrs.define(eq=False)
class _JsonList:
    """A growing list as JSON: the part that every event of a stream repeats is encoded once."""

    _items: bytearray = attrs.field(factory=bytearray)

    def extend(self, values: Sequence[Any]) -> None:
        if values:
            self._items += b"," if self._items else b""
            self._items += _encoder.encode(values)[1:-1]

    def encoded(self) -> Any:
        """Return the list for a field of an answer."""
        return msgspec.Raw(b"[" + self._items + b"]")


@attrs.define(eq=False)
class _JsonText:
    """A growing text as JSON, of which each part is encoded once."""

    _escaped: bytearray = attrs.field(factory=bytearray)

    def extend(self, text: str) -> None:
        self._escaped += _encoder.encode(text)[1:-1]

    def encoded(self) -> Any:
        """Return the text for a field of an answer."""
        return msgspec.Raw(b'"' + self._escaped + b'"')


@attrs.define(eq=False)
class _Logprobs:
    """Reported log-probabilities of some tokens, as lists with an entry for each."""

    tokens: _JsonList = attrs.field(factory=_JsonList)
    top: _JsonList = attrs.field(factory=_JsonList)
    asked: _JsonList = attrs.field(factory=_JsonList)
    mean: float | None = None
    """The mean log-probability of a prompt's tokens."""


@attrs.define(eq=False)
class _SoFar:
    """One output so far, or its part that wasn't sent yet, if events hold only that."""

    text: _JsonText = attrs.field(factory=_JsonText)
    token_ids: list[int] = attrs.field(factory=list)
    encoded_ids: _JsonList = attrs.field(factory=_JsonList)
    logprobs: _Logprobs = attrs.field(factory=_Logprobs)
    inputs_told: bool = False

    def forget_told(self) -> None:
        """Forget the part that an event has sent."""
        self.text, self.encoded_ids, self.logprobs = _JsonText(), _JsonList(), _Logprobs()
        self.inputs_told = True


@attrs.define(eq=False, kw_only=True)
class NativeWriter:
    """Events of a stream, and the replies to a request without one.

    A prompt is identified by its number; each has ``batch.num_outputs`` outputs.
    """

    batch: NativeBatch
    tokenizer: Tokenizer
    eos_token_ids: Sequence[int]
    with_text: bool
    with_prompt_ids: bool
    with_mean: bool = False
    """True if the mean log-probability of the prompt is reported."""
    only_new: bool = False
    """True if an event leaves out what earlier ones have sent."""
    _started: float = attrs.field(factory=time.monotonic)
    _so_far: dict[tuple[int, int], _SoFar] = attrs.field(factory=dict)
    _known_inputs: dict[int, _Logprobs] = attrs.field(factory=dict)
    _streams: list[GenerationStream] = attrs.field(factory=list)

    def start(self, streams: list[GenerationStream]) -> bytes:
        """Return nothing; remember the streams, for their usage."""
        self._streams = streams
        return b""

    def chunk(self, index: int, chunk: Chunk) -> bytes:
        """Return the whole output of ``chunk`` so far, or its new part."""
        so_far = self._so_far.setdefault((index, chunk.index), _SoFar())
        so_far.text.extend(chunk.text)
        so_far.token_ids += chunk.token_ids
        so_far.encoded_ids.extend(chunk.token_ids)
        self._add(chunk.logprobs or (), so_far.logprobs)
        if not chunk.text and chunk.finish_reason is None and not chunk.logprobs:
            return b""
        stream = self._streams[index]
        reply = event(
            self._reply(
                index,
                chunk.index,
                text=so_far.text.encoded(),
                token_ids=so_far.encoded_ids.encoded(),
                num_tokens=len(so_far.token_ids),
                logprobs=so_far.logprobs,
                usage=stream.usage,
                finish=self._finish(chunk.finish_reason, chunk.stop_reason, so_far.token_ids),
                prompt_ids=stream.prompt_token_ids,
                inputs=self._inputs(index, stream.prompt_token_ids, stream.prompt_logprobs),
                with_inputs=not so_far.inputs_told,
                beam_logprob=chunk.beam_logprob,
                tensors={}
                if chunk.finish_reason is None
                else {
                    **stream.output_tensors(chunk.index, len(so_far.token_ids)),
                    **({} if chunk.index else stream.prompt_tensors),
                },
            )
        )
        if self.only_new:
            so_far.forget_told()
        return reply

    def text(self, chunk: Chunk) -> None:
        """Return None: an event repeats all earlier text."""

    def end(self, streams: list[GenerationStream]) -> bytes:
        """Return nothing: the last event of each output holds all of it."""
        return b""

    def replies(self, index: int, server_api: Completion) -> Iterator[GenerateResponse]:
        """Return the outputs of one prompt."""
        for output in server_api.outputs:
            token_ids = list(output.token_ids)
            logprobs = _Logprobs()
            self._add(output.logprobs or (), logprobs)
            yield self._reply(
                index,
                output.index,
                text=output.text,
                token_ids=token_ids,
                num_tokens=len(token_ids),
                logprobs=logprobs,
                usage=server_api.usage,
                finish=self._finish(output.finish_reason, output.stop_reason, token_ids),
                prompt_ids=server_api.prompt_token_ids,
                inputs=self._inputs(index, server_api.prompt_token_ids, server_api.prompt_logprobs),
                beam_logprob=output.beam_logprob,
                tensors={**output.tensors, **({} if output.index else server_api.tensors)},
            )

    def _reply(
        self,
        index: int,
        output: int,
        *,
        text: Any,
        token_ids: Any,
        num_tokens: int,
        logprobs: _Logprobs,
        usage: Usage,
        finish: NativeFinish | None,
        prompt_ids: Sequence[int],
        inputs: _Logprobs,
        with_inputs: bool = True,
        beam_logprob: float | None = None,
        tensors: Arrays,
    ) -> GenerateResponse:
        job, several = self.batch.jobs[index], self.batch.num_outputs > 1
        meta = MetaInfo(
            id=f"{job.request_id}-{output}" if several else job.request_id,
            finish_reason=finish,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=num_tokens,
            cached_tokens=usage.cached_tokens,
            e2e_latency=time.monotonic() - self._started,
        )
        if finish is not None:
            meta.response_sent_to_client_ts = time.time()
        if beam_logprob is not None:
            meta.cumulative_logprob = beam_logprob
        if tensors:
            meta.output_tensors = tensors_as_json(tensors)
        if self.with_mean and with_inputs:
            meta.normalized_prompt_logprob = inputs.mean
        if not with_inputs:
            inputs = _Logprobs()
        params = job.params
        if params.logprobs is not None:
            meta.input_token_logprobs = inputs.tokens.encoded()
            meta.output_token_logprobs = logprobs.tokens.encoded()
            if params.logprobs:
                meta.input_top_logprobs = inputs.top.encoded()
                meta.output_top_logprobs = logprobs.top.encoded()
            if params.logprob_token_ids:
                meta.input_token_ids_logprobs = inputs.asked.encoded()
                meta.output_token_ids_logprobs = logprobs.asked.encoded()
        response = GenerateResponse(text=text, output_ids=token_ids, meta_info=meta)
        if self.batch.listed:
            response.index = index * self.batch.num_outputs + output
        if finish is not None and self.with_prompt_ids:
            response.prompt_token_ids = list(prompt_ids)
        return response

    def _inputs(self, index: int, ids: Sequence[int], logprobs: PromptLogprobs | None) -> _Logprobs:
        """Return the reported log-probabilities of a prompt, computed once."""
        known = self._known_inputs.get(index)
        if known is None:
            known = self._known_inputs[index] = self._find_inputs(index, list(ids), logprobs)
        return known

    def _find_inputs(
        self, index: int, ids: list[int], logprobs: PromptLogprobs | None
    ) -> _Logprobs:
        found = _Logprobs()
        if self.with_mean and logprobs is not None:
            first = self.batch.jobs[index].params.prompt_logprobs_start + 1
            entries = logprobs.entries(ids)[max(first - logprobs.start, 0) :]
            if entries:
                found.mean = _bounded(sum(entry.logprob for entry in entries) / len(entries))
        start = self.batch.starts[index]
        if start is not None and logprobs is not None and start < len(ids):
            # SGLang reports the first token without a log-probability, even if another token comes
            # before it.
            found.tokens.extend([(None, ids[start], self._text(ids[start]))])
            found.top.extend([None])
            found.asked.extend([None])
            self._add(logprobs.entries(ids)[max(start + 1 - logprobs.start, 0) :], found)
        return found

    def _add(self, entries: Sequence[TokenLogprob], logprobs: _Logprobs) -> None:
        """Append the log-probabilities of further tokens to ``entries``."""
        logprobs.tokens.extend([self._chosen(entry) for entry in entries])
        logprobs.top.extend([self._several(entry.top) for entry in entries])
        logprobs.asked.extend([self._several(entry.asked) for entry in entries])

    def _chosen(self, entry: TokenLogprob) -> NativeLogprob:
        return _bounded(entry.logprob), entry.token_id, self._text(entry.token_id)

    def _several(self, entries: Iterable[tuple[int, float, str]]) -> list[NativeLogprob]:
        return [
            (_bounded(logprob), token_id, self._text(token_id)) for token_id, logprob, _ in entries
        ]

    def _text(self, token_id: int) -> str | None:
        return self.tokenizer.token_text(token_id) if self.with_text else None

    def _finish(
        self, reason: str | None, stop_reason: int | str | None, token_ids: Sequence[int]
    ) -> NativeFinish | None:
        """Return the reason for an output's end in SGLang's form; None while it goes on."""
        if reason is None:
            return None
        if reason == "length":
            return NativeFinish("length", length=len(token_ids))
        matched = matched_stop(stop_reason, token_ids, self.eos_token_ids)
        return NativeFinish(reason) if matched is None else NativeFinish(reason, matched=matched)


def _bounded(logprob: float) -> float:
    """Return a log-probability that JSON can represent."""
    return max(logprob, MIN_LOGPROB)
