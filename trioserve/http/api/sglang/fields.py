"""Translation of a ``/generate`` request to jobs for the engine, one for each prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import attrs

from trioserve.http.api.generations import renamed
from trioserve.http.api.jobs import PromptJob
from trioserve.http.api.openai.structured import grammar_field
from trioserve.http.api.schema.reading import one_or_several
from trioserve.http.api.schema.retention import retention_of
from trioserve.http.api.schema.sampling_fields import SHARED_NAMES, beam_width
from trioserve.http.api.service import Service
from trioserve.http.api.sglang.schemas import DEFAULT_NEW_TOKENS, GenerateRequest, NativeSampling
from trioserve.protocol.errors import InvalidRequest
from trioserve.protocol.grammar import Grammar
from trioserve.requests.prompts import Prompt, TextPrompt, TokensPrompt

_ANY_JSON = "$$ANY$$"
"""SGLang's word for a JSON object of any form, in place of a schema's text."""
_SAMPLING_NAMES = {
    **{name: name for name in SHARED_NAMES},
    "n": "n",
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "include_stop_str_in_output": "no_stop_trim",
    "extra_args": "custom_params",
}
"""Names in ``sampling_params``, by the engine's sampling fields."""
_MEDIA_FIELDS = {"image_data": "image", "audio_data": "audio", "video_data": "video"}
"""Kinds of media by the fields that have them."""
_LOGPROB_NAMES = {
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num",
    "prompt_logprobs_start": "logprob_start_len",
    "logprob_token_ids": "token_ids_logprob",
}

Value = TypeVar("Value")


@attrs.frozen(kw_only=True)
class NativeBatch:
    """The jobs of a request.

    ``listed`` is true if the answer is a list. ``starts`` has, for each prompt, the first position
    of the prompt's log-probabilities to report, or None to report none.
    """

    jobs: list[PromptJob]
    listed: bool
    num_outputs: int
    starts: list[int | None]


def read_batch(request: GenerateRequest, service: Service) -> NativeBatch:
    """Return the jobs of ``request``.

    Raises:
        InvalidRequest: a field is out of its range, or lists don't have one entry for each prompt.
    """
    prompts, listed = _prompts(request, service)
    reader = _Reader(request, service, len(prompts))
    jobs = [reader.job(index, prompt) for index, prompt in enumerate(prompts)]
    counts = {job.params.n for job in jobs}
    if len(counts) > 1:
        raise InvalidRequest(
            f"sampling_params.n must be the same for all prompts, got {sorted(counts)}",
            param="sampling_params.n",
        )
    (num_outputs,) = counts
    return NativeBatch(
        jobs=jobs,
        listed=listed or num_outputs > 1,
        num_outputs=num_outputs,
        starts=[reader.start(index) for index in range(len(prompts))],
    )


class _Reader:
    """Fields of a request that are given once or for each of its prompts."""

    def __init__(self, request: GenerateRequest, service: Service, count: int) -> None:
        self._request = request
        self._service = service
        self._count = count
        self._sampling = _per_prompt(request.sampling_params, count, "sampling_params")
        self._wanted = _per_prompt(request.return_logprob, count, "return_logprob")
        self._starts = _per_prompt(request.logprob_start_len, count, "logprob_start_len")
        self._top = _per_prompt(request.top_logprobs_num, count, "top_logprobs_num")
        self._asked = _asked_ids(request.token_ids_logprob, count)
        self._states = _per_prompt(request.return_hidden_states, count, "return_hidden_states")
        self._salts = _per_prompt(request.extra_key, count, "extra_key")
        self._adapters = _per_prompt(request.lora_path, count, "lora_path")
        if isinstance(request.rid, list):
            _check_length(request.rid, count, "rid")

    def job(self, index: int, prompt: Prompt) -> PromptJob:
        sampling = self._sampling[index] or NativeSampling()
        path = "sampling_params"
        if isinstance(self._request.sampling_params, list):
            path += f"[{index}]"
        names = {"prompt": _prompt_field(self._request), **_LOGPROB_NAMES, "adapter": "lora_path"}
        names |= {own: f"{path}.{theirs}" for own, theirs in _SAMPLING_NAMES.items()}
        fields = _fields(sampling, path, self._service.default_max_tokens(DEFAULT_NEW_TOKENS))
        grammar, name = _grammar(sampling, path)
        if grammar is not None:
            fields["grammar"] = grammar
            names["grammar"] = name
        fields |= self._logprob_fields(index)
        fields |= {
            "return_hidden_states": self._states[index],
            "return_context_logits": self._request.return_context_logits,
            "return_generation_logits": self._request.return_generation_logits,
        }
        return PromptJob(
            prompt=prompt,
            params=self._service.sampling(fields, names),
            request_id=self._request_id(index),
            # In SGLang, the larger number runs sooner.
            priority=-(self._request.priority or 0),
            timeout=self._request.timeout,
            cache_salt=self._salts[index] or "",
            retention=retention_of(self._request.kv_cache_retention_config),
            adapter=self._adapters[index] or "",
            renames=names,
        )

    def start(self, index: int) -> int | None:
        """Return the first position of the prompt's log-probabilities, if they are asked for."""
        start = self._starts[index]
        return None if start is None or start < 0 or not self._wanted[index] else start

    def _logprob_fields(self, index: int) -> dict[str, Any]:
        top, asked = self._top[index], self._asked[index]
        start = max(self._starts[index] or 0, 0)
        mean = self._request.return_normalized_logprob
        prompt_fields = {"prompt_logprobs": top or 0, "prompt_logprobs_start": start}
        if not self._wanted[index]:
            for name, given in (
                ("top_logprobs_num", bool(top)),
                ("token_ids_logprob", bool(asked)),
            ):
                if given:
                    raise InvalidRequest(f"{name} needs return_logprob to be true", param=name)
            return prompt_fields if mean else {}
        fields: dict[str, Any] = {"logprobs": top or 0}
        if asked:
            fields["logprob_token_ids"] = asked
        if mean or self.start(index) is not None:
            fields |= prompt_fields
        return fields

    def _request_id(self, index: int) -> str:
        if isinstance(self._request.rid, list):
            return self._request.rid[index]
        base = self._request.rid or self._service.record.request_id
        return base if self._count == 1 else f"{base}-{index}"


def _prompt_field(request: GenerateRequest) -> str:
    return "text" if request.text is not None else "input_ids"


def _prompts(request: GenerateRequest, service: Service) -> tuple[list[Prompt], bool]:
    """Return the prompts, and whether they were given as a batch."""
    if isinstance(request.text, str):
        parts = [
            part
            for name, kind in _MEDIA_FIELDS.items()
            for part in _media_parts(getattr(request, name), kind, name)
        ]
        return [TextPrompt(request.text, media=parts)], False
    if request.text is not None:
        service.check_number_of_prompts(len(request.text), "text")
        media: list[list[dict[str, Any]]] = [[] for _ in request.text]
        for name, kind in _MEDIA_FIELDS.items():
            given = _per_prompt(getattr(request, name) or None, len(media), name)
            for index, each in enumerate(given):
                media[index] += _media_parts(each, kind, f"{name}[{index}]")
        prompts = zip(request.text, media, strict=True)
        return [TextPrompt(text, media=parts) for text, parts in prompts], True
    assert request.input_ids is not None
    for name in _MEDIA_FIELDS:
        if getattr(request, name):
            raise InvalidRequest(f"{name} needs text, which has the places for it", param=name)
    lists, listed = one_or_several(request.input_ids, "input_ids")
    service.check_number_of_prompts(len(lists), "input_ids")
    return [TokensPrompt(tuple(ids)) for ids in lists], listed


def _media_parts(media: Any, kind: str, field: str) -> list[dict[str, Any]]:
    """Return the parts of ``kind`` that a prompt has in ``field``: one, or a list of them."""
    listed = isinstance(media, list)
    given = media if listed else [media] if media else []
    if any(isinstance(each, list) for each in given):
        raise InvalidRequest(f"{field} has a list for each of several prompts", param=field)
    return [
        {"type": kind, kind: each, "name": f"{field}[{index}]" if listed else field}
        for index, each in enumerate(given)
    ]


def _asked_ids(given: Sequence[int | list[int]] | None, count: int) -> Sequence[list[int] | None]:
    """Return the ids to report on, for each prompt."""
    if not given:
        return [None] * count
    lists, listed = one_or_several(given, "token_ids_logprob")
    if not listed:
        return lists * count
    _check_length(lists, count, "token_ids_logprob")
    return lists


def _per_prompt(
    value: Value | list[Value] | list[Value | None] | None, count: int, name: str
) -> list[Value | None]:
    """Return ``value`` for each prompt: one for all of them, or a list with one for each."""
    if not isinstance(value, list):
        return [value] * count
    _check_length(value, count, name)
    return list(value)


def _check_length(values: Sequence[object], count: int, name: str) -> None:
    if len(values) != count:
        raise InvalidRequest(f"{name} is a list of {len(values)} for {count} prompts", param=name)


def _fields(sampling: NativeSampling, path: str, default_max_tokens: int) -> dict[str, Any]:
    fields = {own: getattr(sampling, theirs) for own, theirs in _SAMPLING_NAMES.items()}
    if sampling.max_new_tokens is None:
        fields["max_tokens"] = default_max_tokens
    try:
        fields["beam_width"], _ = beam_width(fields, wanted=sampling.use_beam_search)
    except InvalidRequest as error:
        raise renamed(error, {error.param or "": f"{path}.{error.param}"}) from None
    fewest, most = sampling.min_new_tokens or 0, fields["max_tokens"]
    if fewest > most:  # Found here, because the engine would call the other field max_tokens.
        name = f"{path}.min_new_tokens"
        raise InvalidRequest(
            f"{name} must be at most max_new_tokens ({most}), got {fewest}", param=name
        )
    return fields


def _grammar(sampling: NativeSampling, path: str) -> tuple[Grammar | None, str]:
    """Return the grammar of the output, and the name of its field."""
    schema = sampling.json_schema
    rules: dict[str, Any] = {
        "json_schema": {"type": "object"} if schema == _ANY_JSON else schema,
        "regex": sampling.regex,
        "ebnf": sampling.ebnf,
        "structural_tag": sampling.structural_tag,
    }
    try:
        found = grammar_field(**rules)
    except InvalidRequest as error:
        raise renamed(error, {error.param or "": f"{path}.{error.param}"}) from None
    return (None, "") if found is None else (found.grammar, f"{path}.{found.name}")
