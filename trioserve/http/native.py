"""SGLang's ``/generate``: one prompt or a batch, streaming or not.

As there, an event of a stream holds the whole output so far, and the events of a batch say which
prompt they belong to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import attrs
import quart
import trio

from trioserve.errors import InvalidRequest
from trioserve.generation import Completion, GenerationStream, Usage
from trioserve.http.generations import Job
from trioserve.http.native_schemas import (
    DEFAULT_NEW_TOKENS,
    GenerateRequest,
    GenerateResponse,
    MetaInfo,
    NativeFinish,
    NativeLogprob,
    NativeSampling,
)
from trioserve.http.openai_writer import MIN_LOGPROB
from trioserve.http.service import Service, json_response
from trioserve.http.sse import event
from trioserve.request import Prompt, TextPrompt, TokensPrompt
from trioserve.stream import Chunk, TokenLogprob

__all__ = ["NativeEndpoints", "NativeWriter"]

_RENAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "logprobs": "top_logprobs_num",
    "include_stop_str_in_output": "no_stop_trim",
}
_SAME_NAMES = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty"),
    *("presence_penalty", "logit_bias", "stop", "stop_token_ids", "ignore_eos"),
    "skip_special_tokens",
)

Value = TypeVar("Value")


class NativeEndpoints:
    """The handler, over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def generate(self) -> quart.Response:
        """``POST /generate``."""
        request = await self._service.read(GenerateRequest)
        prompts, batched = _prompts(request)
        self._service.check_number_of_prompts(len(prompts), _prompt_field(request))
        jobs = self._jobs(request, prompts)
        writer = NativeWriter(
            ids=[job.request_id for job in jobs],
            batched=batched,
            text_in_logprobs=bool(request.return_text_in_logprobs),
        )
        if request.stream:
            return self._service.stream(jobs, writer)
        completions = await self._service.complete(jobs)
        replies = [writer.reply(index, whole) for index, whole in enumerate(completions)]
        return json_response(replies if batched else replies[0])

    def _jobs(self, request: GenerateRequest, prompts: list[Prompt]) -> list[Job]:
        count = len(prompts)
        sampling = _per_prompt(request.sampling_params, count, "sampling_params")
        wanted = _per_prompt(request.return_logprob, count, "return_logprob")
        top = _per_prompt(request.top_logprobs_num, count, "top_logprobs_num")
        renames = {**_RENAMES, "prompt": _prompt_field(request)}
        jobs = []
        for index, prompt in enumerate(prompts):
            fields = _fields(sampling[index] or NativeSampling())
            if wanted[index]:
                fields["logprobs"] = top[index] or 0
            elif top[index]:
                raise InvalidRequest(
                    "top_logprobs_num needs return_logprob to be true", param="top_logprobs_num"
                )
            jobs.append(
                Job(
                    prompt=prompt,
                    params=self._service.sampling(fields, renames),
                    request_id=self._request_id(request, index, count),
                    # There, a larger number is the sooner one.
                    priority=-(request.priority or 0),
                    timeout=request.timeout,
                    cache_salt=request.extra_key or "",
                    renames=renames,
                )
            )
        return jobs

    def _request_id(self, request: GenerateRequest, index: int, count: int) -> str:
        if isinstance(request.rid, list):
            _check_length(request.rid, count, "rid")
            return request.rid[index]
        base = request.rid or self._service.record.request_id
        return base if count == 1 else f"{base}-{index}"


def _prompt_field(request: GenerateRequest) -> str:
    return "text" if request.text is not None else "input_ids"


def _prompts(request: GenerateRequest) -> tuple[list[Prompt], bool]:
    """The prompts, and whether they were given as a batch."""
    if (request.text is None) == (request.input_ids is None):
        raise InvalidRequest("give either text or input_ids", param="text")
    if isinstance(request.text, str):
        return [TextPrompt(request.text)], False
    if request.text is not None:
        return [TextPrompt(text) for text in request.text], True
    assert request.input_ids is not None
    ids = [item for item in request.input_ids if isinstance(item, int)]
    if ids and len(ids) == len(request.input_ids):
        return [TokensPrompt(tuple(ids))], False
    lists = [item for item in request.input_ids if isinstance(item, list)]
    if len(lists) != len(request.input_ids):
        raise InvalidRequest(
            "input_ids is a list of token ids, or a list of such lists", param="input_ids"
        )
    return [TokensPrompt(tuple(item)) for item in lists], True


def _per_prompt(value: Value | list[Value] | None, count: int, name: str) -> list[Value | None]:
    """``value`` for each prompt: one for all of them, or a list with one for each."""
    if not isinstance(value, list):
        return [value] * count
    _check_length(value, count, name)
    return list(value)


def _check_length(values: Sequence[object], count: int, name: str) -> None:
    if len(values) != count:
        raise InvalidRequest(f"{name} is a list of {len(values)} for {count} prompts", param=name)


def _fields(sampling: NativeSampling) -> dict[str, Any]:
    fields: dict[str, Any] = {name: getattr(sampling, name) for name in _SAME_NAMES}
    maximum = sampling.max_new_tokens
    fields["max_tokens"] = DEFAULT_NEW_TOKENS if maximum is None else maximum
    fields["min_tokens"] = sampling.min_new_tokens
    fields["seed"] = sampling.sampling_seed
    fields["include_stop_str_in_output"] = sampling.no_stop_trim
    return fields


@attrs.define(eq=False)
class _SoFar:
    """One prompt's output up to now."""

    text: str = ""
    token_ids: list[int] = attrs.field(factory=list)
    logprobs: list[TokenLogprob] | None = None

    def add(self, chunk: Chunk) -> None:
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        if chunk.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += chunk.logprobs


@attrs.define(eq=False, kw_only=True)
class NativeWriter:
    """The events of a stream, and the replies of a request without one."""

    ids: Sequence[str]
    batched: bool
    text_in_logprobs: bool
    _started: float = attrs.field(factory=trio.current_time)
    _so_far: list[_SoFar] = attrs.field(init=False)
    _streams: list[GenerationStream] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        self._so_far = [_SoFar() for _ in self.ids]

    def start(self, streams: list[GenerationStream]) -> bytes:
        """Nothing; only remembers whose usage to tell."""
        self._streams = streams
        return b""

    def chunk(self, index: int, chunk: Chunk) -> bytes:
        """The whole output of one prompt so far."""
        so_far = self._so_far[index]
        so_far.add(chunk)
        if not chunk.text and chunk.finish_reason is None and not chunk.logprobs:
            return b""
        return event(
            self._reply(
                index,
                text=so_far.text,
                token_ids=so_far.token_ids,
                logprobs=so_far.logprobs,
                usage=self._streams[index].usage,
                finish=_finish(chunk.finish_reason, chunk.stop_reason, len(so_far.token_ids)),
            )
        )

    def end(self, streams: list[GenerationStream]) -> bytes:
        """Nothing: the last event of each prompt has said all."""
        return b""

    def reply(self, index: int, whole: Completion) -> GenerateResponse:
        """The whole output of one prompt."""
        return self._reply(
            index,
            text=whole.text,
            token_ids=list(whole.token_ids),
            logprobs=whole.logprobs,
            usage=whole.usage,
            finish=_finish(whole.finish_reason, whole.stop_reason, len(whole.token_ids)),
        )

    def _reply(
        self,
        index: int,
        *,
        text: str,
        token_ids: list[int],
        logprobs: Sequence[TokenLogprob] | None,
        usage: Usage,
        finish: NativeFinish | None,
    ) -> GenerateResponse:
        meta = MetaInfo(
            id=self.ids[index],
            finish_reason=finish,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            e2e_latency=trio.current_time() - self._started,
        )
        if logprobs is not None:
            meta.input_token_logprobs = []
            meta.output_token_logprobs = [self._chosen(entry) for entry in logprobs]
            meta.input_top_logprobs = []
            meta.output_top_logprobs = [self._top(entry) for entry in logprobs]
        response = GenerateResponse(text=text, output_ids=token_ids, meta_info=meta)
        if self.batched:
            response.index = index
        return response

    def _chosen(self, entry: TokenLogprob) -> NativeLogprob:
        text = entry.text if self.text_in_logprobs else None
        return max(entry.logprob, MIN_LOGPROB), entry.token_id, text

    def _top(self, entry: TokenLogprob) -> list[NativeLogprob]:
        return [
            (max(logprob, MIN_LOGPROB), token_id, text if self.text_in_logprobs else None)
            for token_id, logprob, text in entry.top
        ]


def _finish(reason: str | None, stop_reason: int | str | None, length: int) -> NativeFinish | None:
    """Why an output ended, in SGLang's words; None while it goes on."""
    if reason is None:
        return None
    if reason == "length":
        return NativeFinish("length", length=length)
    if stop_reason is None:
        return NativeFinish(reason)
    return NativeFinish(reason, matched=stop_reason)
