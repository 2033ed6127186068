"""Handler of ``/v1/completions``: from a request's fields to jobs for the engine, one for each
prompt.

:mod:`trioserve.http.api.openai.completions.writer` writes the answers.
"""

from __future__ import annotations

import time
from typing import Any, cast

import msgspec
import quart

from trioserve.http.api.jobs import PromptJob
from trioserve.http.api.openai.completions.schemas import CompletionRequest
from trioserve.http.api.openai.completions.writer import (
    CompletionWriter,
    Wanted,
    completion_response,
)
from trioserve.http.api.openai.fields import (
    check_stream_options,
    continuous_usage,
    include_usage,
    make_job,
    request_id,
    sampling_fields,
)
from trioserve.http.api.prompt_embeds import read_embeddings
from trioserve.http.api.service import Service, json_response
from trioserve.http.api.sessions.turns import as_turn
from trioserve.http.api.threads import num_logprobs, run_if_long
from trioserve.protocol.errors import InvalidRequest
from trioserve.requests.embedded import EmbeddingsPrompt
from trioserve.requests.prompts import Prompt, TextPrompt, TokensPrompt

DEFAULT_COMPLETION_TOKENS = 16
"""Output tokens of a completion that gives no limit, as in the OpenAI API."""


class CompletionEndpoints:
    """The handler, over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def completions(self) -> quart.Response:
        """Handle ``POST /v1/completions``."""
        request = await self._service.read(CompletionRequest)
        with self._service.deadline(request.timeout).enforced():
            return await self._answer(request)

    async def _answer(self, request: CompletionRequest) -> quart.Response:
        service = self._service
        if request.prompt is None and not request.prompt_embeds:
            raise InvalidRequest("prompt is missing: give it, or prompt_embeds", param="prompt")
        model = service.model(request.model)
        check_stream_options(request)
        prompts = await _prompts(request, service)
        jobs = as_turn(service, request.session_params, self._jobs(request, prompts))
        if request.echo and jobs[0].turn is not None:
            raise InvalidRequest("echo isn't served in a session", param="echo")
        wanted = _wanted(request, jobs[0], service)
        created = int(time.time())
        response_id = request_id("cmpl", request, service)
        if request.stream:
            writer = CompletionWriter(
                id=response_id,
                model=model,
                created=created,
                include_usage=include_usage(request),
                continuous_usage=continuous_usage(request),
                prompts=prompts,
                wanted=wanted,
            )
            return service.stream(jobs, writer)
        completions = await service.complete(jobs)

        def answer() -> msgspec.Raw:
            response = completion_response(
                completions, prompts, wanted, id=response_id, model=model, created=created
            )
            return msgspec.Raw(msgspec.json.encode(response))

        return json_response(await run_if_long(num_logprobs(completions), answer))

    def _jobs(self, request: CompletionRequest, prompts: list[Prompt]) -> list[PromptJob]:
        base = request_id("cmpl", request, self._service)
        ids = [base] if len(prompts) == 1 else [f"{base}-{i}" for i in range(len(prompts))]
        fields, renames = _sampling(request)
        if request.max_tokens is None:
            fields["max_tokens"] = self._service.default_max_tokens(DEFAULT_COMPLETION_TOKENS)
        params = self._service.sampling(fields, renames)
        return [
            make_job(self._service, request, prompt, id, params, _names_for(prompt, renames))
            for prompt, id in zip(prompts, ids, strict=True)
        ]


def _names_for(prompt: Prompt, renames: dict[str, str]) -> dict[str, str]:
    """Return ``renames`` with the field that has ``prompt``."""
    return (
        {**renames, "prompt": "prompt_embeds"} if isinstance(prompt, EmbeddingsPrompt) else renames
    )


def _sampling(request: CompletionRequest) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the engine's sampling fields, and the completion's names of differently named ones."""
    fields, renames = sampling_fields(request, request.best_of)
    fields["logprobs"] = _num_top(request)
    if request.echo and request.logprobs is not None:
        most = max(request.logprobs, request.prompt_logprobs or 0)
        fields["prompt_logprobs"] = most
        if most != request.prompt_logprobs:
            renames["prompt_logprobs"] = "logprobs"
    n = request.n or 1
    if request.best_of is not None and request.best_of != n and not request.use_beam_search:
        _check_best_of(request, request.best_of, n)
        fields["n"] = request.best_of
        renames["n"] = "best_of"
        if request.logprobs is None:
            fields["logprobs"] = 0  # to find the best; the client doesn't see those of other tokens
            if request.prompt_logprobs is None and request.logprob_token_ids:
                raise InvalidRequest(
                    "logprob_token_ids needs logprobs or prompt_logprobs", param="logprob_token_ids"
                )
    return fields, renames


def _num_top(request: CompletionRequest) -> int | None:
    """Return the number of most probable tokens to return; tokens asked for by id replace them."""
    return 0 if request.logprobs is not None and request.logprob_token_ids else request.logprobs


def _check_best_of(request: CompletionRequest, best_of: int, n: int) -> None:
    if best_of < n:
        raise InvalidRequest(f"best_of must be at least n ({n}), got {best_of}", param="best_of")
    if request.stream:
        raise InvalidRequest(
            f"best_of must be n ({n}) with stream, since the best aren't known before the end, "
            f"got {best_of}",
            param="best_of",
        )


def _wanted(request: CompletionRequest, job: PromptJob, service: Service) -> Wanted:
    """Return the parts that the answer is to show; all jobs have the parameters of ``job``."""
    return Wanted(
        tokenizer=service.engine.tokenizer,
        n=request.n or 1,
        echo=bool(request.echo),
        logprobs=request.logprobs,
        num_top=_num_top(request) or 0,
        eos_token_ids=service.engine.eos_token_ids,
        prompt_logprobs=request.prompt_logprobs,
        token_ids=bool(request.return_token_ids),
        tokens_as_ids=bool(request.return_tokens_as_token_ids),
        skip_special_tokens=job.params.skip_special_tokens,
        spaces_between_special_tokens=job.params.spaces_between_special_tokens,
        truncated=job.params.truncate_prompt_tokens is not None,
    )


async def _prompts(request: CompletionRequest, service: Service) -> list[Prompt]:
    """Return the prompts of a completion: first the embeddings, then those of the other forms.

    Raises:
        InvalidRequest: One is malformed.
    """
    given = request.prompt_embeds
    if not given:
        assert request.prompt is not None
        return _plain_prompts(request, request.prompt, service)
    field = "prompt_embeds"
    if request.echo:
        raise InvalidRequest(f"echo needs text, and {field} has none", param="echo")
    if isinstance(given, str):
        texts, names = [given], [field]
    else:
        service.check_number_of_prompts(len(given), field)
        texts, names = given, [f"{field}[{index}]" for index in range(len(given))]
    # Some clients always send a prompt.
    others = _plain_prompts(request, request.prompt, service) if request.prompt else []
    return [*await read_embeddings(texts, names), *others]


def _plain_prompts(
    request: CompletionRequest, given: str | list[Any], service: Service
) -> list[Prompt]:
    """Return the prompts of texts and token ids, given in any of the four forms."""
    special = True if request.add_special_tokens is None else request.add_special_tokens
    if isinstance(given, str):
        return [TextPrompt(given, add_special_tokens=special)]
    if set(map(type, given)) == {int}:
        return [TokensPrompt(cast(tuple[int, ...], tuple(given)))]
    service.check_number_of_prompts(len(given), "prompt")
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
