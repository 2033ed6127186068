"""Translation of the fields that all OpenAI endpoints share to jobs for the engine."""

from __future__ import annotations

from typing import Any

from trioserve.http.api.jobs import PromptJob
from trioserve.http.api.openai.schemas import GenerationRequest
from trioserve.http.api.openai.structured import grammar_field
from trioserve.http.api.schema.retention import retention_of
from trioserve.http.api.schema.sampling_fields import SHARED_NAMES, beam_width
from trioserve.http.api.service import Service
from trioserve.protocol.errors import InvalidRequest
from trioserve.protocol.sampling import SamplingParams
from trioserve.requests.prompts import Prompt

_SAMPLING_FIELDS = (
    *SHARED_NAMES,
    *("n", "allowed_token_ids", "bad_words", "seed", "max_tokens", "min_tokens"),
    *("prompt_logprobs", "logprob_token_ids", "truncate_prompt_tokens", "truncation_side"),
)
_OTHER_NAMES = {
    "include_stop_str_in_output": ("include_stop_str_in_output", "no_stop_trim"),
    "extra_args": ("vllm_xargs", "custom_params"),
}
"""Names of sampling fields here, by the engine's names: a request gives one or the other."""
_GRAMMAR_FIELDS = (
    *("response_format", "structured_outputs", "guided_json", "guided_json_object"),
    *("guided_regex", "guided_choice", "guided_grammar", "guided_whitespace_pattern"),
    *("json_schema", "regex", "ebnf"),
)


def sampling_fields(
    request: GenerationRequest, best_of: int | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the sampling fields of a request of any of the endpoints.

    ``best_of`` is the number of beams where the request names no other.

    Returns:
        the fields by the engine's names, None for those not given; and the names in ``request`` of
            the
        fields that it names differently, by the engine's names.

    Raises:
        InvalidRequest: two fields give the form of the output, or one is invalid.
    """
    fields = {name: getattr(request, name) for name in _SAMPLING_FIELDS}
    renames = {}
    for name, others in _OTHER_NAMES.items():
        for other in others:
            if (value := getattr(request, other)) is not None:
                fields[name], renames[name] = value, other
    found = grammar_field(**{name: getattr(request, name) for name in _GRAMMAR_FIELDS})
    if found is not None:
        fields["grammar"], renames["grammar"] = found.grammar, found.name
    fields["beam_width"], renames["beam_width"] = beam_width(
        fields, wanted=request.use_beam_search, best_of=best_of
    )
    return fields, renames


ID_PREFIXES = (*("chatcmpl-", "cmpl-", "msg_", "resp_", "embd-", "score-", "rerank-", "classify-"),)
"""Prefixes of a request's id in its response."""


def request_id(prefix: str, request: GenerationRequest, service: Service) -> str:
    """Return the id of a response, made of the client's own id, or of the HTTP request's."""
    return f"{prefix}-{request.request_id or request.rid or service.record.request_id}"


def make_job(
    service: Service,
    request: GenerationRequest,
    prompt: Prompt,
    id: str,
    params: SamplingParams,
    renames: dict[str, str],
) -> PromptJob:
    """Return a job for one prompt of ``request``.

    Args:
        params: the sampling parameters, which the prompts of a request share.
        renames: the names in ``request`` of differently named fields, by the engine's names.

    Raises:
        InvalidRequest: the request names two adapters.
    """
    adapter, field = service.adapter(request.model, request.lora_path)
    return PromptJob(
        prompt=prompt,
        params=params,
        request_id=id,
        priority=request.priority or 0,
        timeout=request.timeout,
        cache_salt=request.cache_salt or request.extra_key or "",
        retention=retention_of(request.kv_cache_retention_config),
        adapter=adapter,
        renames={**renames, "adapter": field},
    )


def check_stream_options(request: GenerationRequest) -> None:
    """Refuse stream options without a stream, and fields that a stream doesn't support."""
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequest(
            "prompt_logprobs isn't served with stream: leave out one of them",
            param="prompt_logprobs",
        )


def include_usage(request: GenerationRequest) -> bool:
    """Return whether a stream ends with the usage."""
    return request.stream_options is not None and bool(request.stream_options.include_usage)


def continuous_usage(request: GenerationRequest) -> bool:
    """Return whether every event of a stream has the usage so far."""
    options = request.stream_options
    return include_usage(request) and options is not None and bool(options.continuous_usage_stats)
