"""``/v1/completions``: from a request's fields to jobs for the engine, one for each prompt.

What comes back is put into its words by :mod:`trioserve.http.completion_writer`.
"""

from __future__ import annotations

import time

import quart

from trioserve.errors import InvalidRequest
from trioserve.http.completion_schemas import CompletionRequest
from trioserve.http.completion_writer import CompletionWriter, completion_response
from trioserve.http.generations import Job
from trioserve.http.openai_fields import (
    check_stream_options,
    include_usage,
    make_job,
    request_id,
    sampling_fields,
)
from trioserve.http.service import Service, json_response
from trioserve.request import Prompt, TextPrompt, TokensPrompt

__all__ = ["CompletionEndpoints"]

DEFAULT_COMPLETION_TOKENS = 16
"""What a completion gets that says nothing of it, as in the OpenAI API."""


class CompletionEndpoints:
    """The handler, over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def completions(self) -> quart.Response:
        """``POST /v1/completions``."""
        service = self._service
        request = await service.read(CompletionRequest)
        model = service.model(request.model)
        jobs = self._completion_jobs(request)
        check_stream_options(request)
        created = int(time.time())
        echoes = [_echo(job.prompt, service) if request.echo else "" for job in jobs]
        response_id = request_id("cmpl", request, service)
        if request.stream:
            writer = CompletionWriter(
                id=response_id,
                model=model,
                created=created,
                echoes=echoes,
                include_usage=include_usage(request),
            )
            return service.stream(jobs, writer)
        outputs = await service.complete(jobs)
        return json_response(
            completion_response(
                outputs,
                id=response_id,
                model=model,
                created=created,
                echoes=echoes,
            )
        )

    def _completion_jobs(self, request: CompletionRequest) -> list[Job]:
        if request.echo and request.logprobs is not None:
            raise InvalidRequest(
                "echo together with logprobs asks for the prompt's log-probabilities, which aren't "
                "served",
                param="echo",
                code="unsupported_parameter",
            )
        prompts = _prompts(request)
        self._service.check_number_of_prompts(len(prompts), "prompt")
        base = request_id("cmpl", request, self._service)
        ids = [base] if len(prompts) == 1 else [f"{base}-{i}" for i in range(len(prompts))]
        fields = sampling_fields(request)
        fields["logprobs"] = request.logprobs
        if request.max_tokens is None:
            fields["max_tokens"] = DEFAULT_COMPLETION_TOKENS
        return [
            make_job(self._service, request, prompt, id, fields, {})
            for prompt, id in zip(prompts, ids, strict=True)
        ]


def _prompts(request: CompletionRequest) -> list[Prompt]:
    """The prompts of a completion, whichever of the four forms they have."""
    given = request.prompt
    special = True if request.add_special_tokens is None else request.add_special_tokens
    if isinstance(given, str):
        return [TextPrompt(given, add_special_tokens=special)]
    if given and all(isinstance(item, int) for item in given):
        return [TokensPrompt(tuple(item for item in given if isinstance(item, int)))]
    prompts: list[Prompt] = []
    for index, item in enumerate(given):
        if isinstance(item, int):
            raise InvalidRequest(
                f"prompt[{index}]: a list of prompts holds texts or lists of token ids",
                param=f"prompt[{index}]",
            )
        if isinstance(item, str):
            prompts.append(TextPrompt(item, add_special_tokens=special))
        else:
            prompts.append(TokensPrompt(tuple(item)))
    return prompts


def _echo(prompt: Prompt, service: Service) -> str:
    """The text of a completion's prompt."""
    if isinstance(prompt, TextPrompt):
        return prompt.text
    assert isinstance(prompt, TokensPrompt)
    return service.engine.tokenizer.decode(prompt.token_ids)
