"""``/v1/chat/completions``: from a request's fields to a job for the engine.

What comes back is put into its words by :mod:`trioserve.http.chat_writer`.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
import quart

from trioserve.errors import InvalidRequest
from trioserve.http.chat_schemas import ChatCompletionRequest
from trioserve.http.chat_writer import ChatWriter, chat_response
from trioserve.http.generations import Job
from trioserve.http.openai_fields import (
    check_stream_options,
    include_usage,
    make_job,
    request_id,
    sampling_fields,
)
from trioserve.http.service import Service, json_response
from trioserve.request import ChatPrompt

__all__ = ["ChatEndpoints"]


class ChatEndpoints:
    """The handler, over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def chat_completions(self) -> quart.Response:
        """``POST /v1/chat/completions``."""
        service = self._service
        request = await service.read(ChatCompletionRequest)
        model = service.model(request.model)
        job = self._chat_job(request)
        check_stream_options(request)
        created = int(time.time())
        tokenizer = service.engine.tokenizer
        if request.stream:
            writer = ChatWriter(
                id=job.request_id,
                model=model,
                created=created,
                tokenizer=tokenizer,
                include_usage=include_usage(request),
            )
            return service.stream([job], writer)
        (completion,) = await service.complete([job])
        return json_response(
            chat_response(completion, model=model, created=created, tokenizer=tokenizer)
        )

    def _chat_job(self, request: ChatCompletionRequest) -> Job:
        if request.tools and request.tool_choice != "none":
            raise InvalidRequest(
                'tools isn\'t served: leave it out or give tool_choice "none"',
                param="tools",
                code="unsupported_parameter",
            )
        fields, renames = _chat_sampling(request)
        messages = tuple(msgspec.to_builtins(message) for message in request.messages)
        prompt = ChatPrompt(
            messages=messages,
            add_generation_prompt=_add_generation_prompt(request),
            continue_final_message=bool(request.continue_final_message),
            template_arguments=request.chat_template_kwargs or {},
        )
        id = request_id("chatcmpl", request, self._service)
        return make_job(self._service, request, prompt, id, fields, renames)


def _chat_sampling(request: ChatCompletionRequest) -> tuple[dict[str, Any], dict[str, str]]:
    """The engine's sampling fields, and which of them a chat calls something else."""
    fields, renames = sampling_fields(request)
    renames["prompt"] = "messages"
    if request.max_completion_tokens is not None:
        if request.max_tokens not in (None, request.max_completion_tokens):
            raise InvalidRequest(
                "max_tokens and max_completion_tokens differ; give one of them",
                param="max_completion_tokens",
            )
        fields["max_tokens"] = request.max_completion_tokens
        renames["max_tokens"] = "max_completion_tokens"
    if request.logprobs:
        fields["logprobs"] = request.top_logprobs or 0
        renames["logprobs"] = "top_logprobs"
    elif request.top_logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    return fields, renames


def _add_generation_prompt(request: ChatCompletionRequest) -> bool:
    if request.add_generation_prompt is None:
        return not request.continue_final_message
    if request.add_generation_prompt and request.continue_final_message:
        raise InvalidRequest(
            "continue_final_message excludes add_generation_prompt", param="continue_final_message"
        )
    return request.add_generation_prompt
