"""The OpenAI endpoints: from a request's fields to jobs for the engine.

What comes back is put into their words by :mod:`trioserve.http.openai_chat` and
:mod:`trioserve.http.openai_completions`.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
import quart

from trioserve.errors import InvalidRequest
from trioserve.http.generations import Job
from trioserve.http.openai_chat import ChatWriter, chat_response
from trioserve.http.openai_completions import CompletionWriter, completion_response
from trioserve.http.openai_schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    ModelCard,
    ModelList,
)
from trioserve.http.service import Service, json_response
from trioserve.request import ChatPrompt, Prompt, TextPrompt, TokensPrompt

__all__ = ["OpenAIEndpoints"]

_SAMPLING_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty"),
    *("presence_penalty", "logit_bias", "seed", "max_tokens", "min_tokens", "stop"),
    *("stop_token_ids", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens"),
)


DEFAULT_COMPLETION_TOKENS = 16
"""What a completion gets that says nothing of it, as in the OpenAI API."""


class OpenAIEndpoints:
    """The handlers, over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def chat_completions(self) -> quart.Response:
        """``POST /v1/chat/completions``."""
        service = self._service
        request = await service.read(ChatCompletionRequest)
        model = service.model(request.model)
        job = self._chat_job(request)
        _check_stream_options(request)
        created = int(time.time())
        tokenizer = service.engine.tokenizer
        if request.stream:
            writer = ChatWriter(
                id=job.request_id,
                model=model,
                created=created,
                tokenizer=tokenizer,
                include_usage=_include_usage(request),
            )
            return service.stream([job], writer)
        (completion,) = await service.complete([job])
        return json_response(
            chat_response(completion, model=model, created=created, tokenizer=tokenizer)
        )

    async def completions(self) -> quart.Response:
        """``POST /v1/completions``."""
        service = self._service
        request = await service.read(CompletionRequest)
        model = service.model(request.model)
        jobs = self._completion_jobs(request)
        _check_stream_options(request)
        created = int(time.time())
        echoes = [_echo(job.prompt, service) if request.echo else "" for job in jobs]
        response_id = self._request_id("cmpl", request)
        if request.stream:
            writer = CompletionWriter(
                id=response_id,
                model=model,
                created=created,
                echoes=echoes,
                include_usage=_include_usage(request),
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

    async def models(self) -> quart.Response:
        """``GET /v1/models``."""
        return json_response(ModelList([self._card(name) for name in self._service.model_names]))

    async def model(self, name: str) -> quart.Response:
        """``GET /v1/models/{name}``."""
        return json_response(self._card(self._service.model(name)))

    def _card(self, name: str) -> ModelCard:
        return ModelCard(
            id=name,
            created=self._service.started,
            root=self._service.engine.model_name,
            max_model_len=self._service.engine.max_model_len,
        )

    def _request_id(self, prefix: str, request: GenerationRequest) -> str:
        return f"{prefix}-{request.request_id or self._service.record.request_id}"

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
        return self._job(request, prompt, self._request_id("chatcmpl", request), fields, renames)

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
        base = self._request_id("cmpl", request)
        ids = [base] if len(prompts) == 1 else [f"{base}-{i}" for i in range(len(prompts))]
        fields = _sampling_fields(request)
        fields["logprobs"] = request.logprobs
        if request.max_tokens is None:
            fields["max_tokens"] = DEFAULT_COMPLETION_TOKENS
        return [
            self._job(request, prompt, request_id, fields, {})
            for prompt, request_id in zip(prompts, ids, strict=True)
        ]

    def _job(
        self,
        request: GenerationRequest,
        prompt: Prompt,
        request_id: str,
        fields: dict[str, Any],
        renames: dict[str, str],
    ) -> Job:
        return Job(
            prompt=prompt,
            params=self._service.sampling(fields, renames),
            request_id=request_id,
            priority=request.priority or 0,
            timeout=request.timeout,
            cache_salt=request.cache_salt or "",
            renames=renames,
        )


def _sampling_fields(request: GenerationRequest) -> dict[str, Any]:
    return {name: getattr(request, name) for name in _SAMPLING_FIELDS}


def _chat_sampling(request: ChatCompletionRequest) -> tuple[dict[str, Any], dict[str, str]]:
    """The engine's sampling fields, and which of them a chat calls something else."""
    fields = _sampling_fields(request)
    renames = {"prompt": "messages"}
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


def _check_stream_options(request: GenerationRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")


def _include_usage(request: GenerationRequest) -> bool:
    return request.stream_options is not None and bool(request.stream_options.include_usage)
