"""From the fields that all OpenAI endpoints share to jobs for the engine."""

from __future__ import annotations

from typing import Any

from trioserve.errors import InvalidRequest
from trioserve.http.generations import Job
from trioserve.http.openai_schemas import GenerationRequest
from trioserve.http.service import Service
from trioserve.request import Prompt

__all__ = ["check_stream_options", "include_usage", "make_job", "request_id", "sampling_fields"]

_SAMPLING_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty"),
    *("presence_penalty", "logit_bias", "seed", "max_tokens", "min_tokens", "stop"),
    *("stop_token_ids", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens"),
)


def sampling_fields(request: GenerationRequest) -> dict[str, Any]:
    """The engine's sampling fields that have the same name here; None for those not given."""
    return {name: getattr(request, name) for name in _SAMPLING_FIELDS}


def request_id(prefix: str, request: GenerationRequest, service: Service) -> str:
    """The id of a response: the client's own, or that of the HTTP request."""
    return f"{prefix}-{request.request_id or service.record.request_id}"


def make_job(
    service: Service,
    request: GenerationRequest,
    prompt: Prompt,
    id: str,
    fields: dict[str, Any],
    renames: dict[str, str],
) -> Job:
    """A job for one prompt of ``request``.

    Args:
        fields: sampling fields by the engine's names.
        renames: the engine's names of fields that ``request`` calls something else, to its own.

    Raises:
        InvalidRequest: a field is out of its range; ``param`` is the name it has in ``request``.
    """
    return Job(
        prompt=prompt,
        params=service.sampling(fields, renames),
        request_id=id,
        priority=request.priority or 0,
        timeout=request.timeout,
        cache_salt=request.cache_salt or "",
        renames=renames,
    )


def check_stream_options(request: GenerationRequest) -> None:
    """Refuse stream options for what isn't streamed."""
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")


def include_usage(request: GenerationRequest) -> bool:
    """Whether a stream ends with the usage."""
    return request.stream_options is not None and bool(request.stream_options.include_usage)
