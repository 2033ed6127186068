"""``/v1/chat/completions``: from a request's fields to a job for the engine.

What comes back is read by :mod:`trioserve.http.chat.answer` and put into its words by
:mod:`trioserve.http.chat.writer`.
"""

from __future__ import annotations

import time
from typing import Any

import attrs
import quart
import trio

from trioserve.errors import InvalidRequest
from trioserve.grammar import Grammar
from trioserve.http.chat.answer import ReaderOptions, hidden_tokens, opens_reasoning
from trioserve.http.chat.format import ChatFormat
from trioserve.http.chat.legacy import in_legacy_words, with_tools
from trioserve.http.chat.prompt import chat_prompt
from trioserve.http.chat.schemas import ChatCompletionRequest
from trioserve.http.chat.tools import tool_use
from trioserve.http.chat.writer import ChatWriter, WantedChat, chat_response
from trioserve.http.generations import Job, renamed
from trioserve.http.openai.fields import (
    check_stream_options,
    continuous_usage,
    include_usage,
    make_job,
    request_id,
    sampling_fields,
)
from trioserve.http.service import Service, json_response
from trioserve.http.threads import num_logprobs, run_if_long
from trioserve.lark import lark_of
from trioserve.reasoning import CLOSE, after_reasoning
from trioserve.request import ChatPrompt
from trioserve.tool_parsers import ToolUse

__all__ = ["ChatEndpoints"]

_END_OF_PROMPT = 1000
"""Characters at the end of a prompt among which a mark is looked for."""


class ChatEndpoints:
    """The handler, over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._format = ChatFormat.of(service.engine.tokenizer, service.config)
        self._hidden = {
            with_tools: hidden_tokens(self._format, with_tools=with_tools)
            for with_tools in (False, True)
        }

    async def chat_completions(self) -> quart.Response:
        """``POST /v1/chat/completions``."""
        request = with_tools(await self._service.read(ChatCompletionRequest))
        with self._service.deadline(request.timeout).enforced():
            return await self._answer(request)

    async def _answer(self, request: ChatCompletionRequest) -> quart.Response:
        service = self._service
        model = service.model(request.model)
        check_stream_options(request)
        try:
            use = self._tool_use(request)
            prompt = chat_prompt(request, self._format, use)
            options = self._reader_options(request, prompt, use)
            job = await self._job(request, options)
        except RecursionError:
            # Of schemas and arguments that could just be read, and can't be written.
            raise InvalidRequest("the body is nested too deeply") from None
        wanted = self._wanted(request, job, options)
        created = int(time.time())
        if request.stream:
            writer = ChatWriter(
                id=job.request_id,
                model=model,
                created=created,
                include_usage=include_usage(request),
                continuous_usage=continuous_usage(request),
                wanted=wanted,
            )
            return service.stream([job], writer)
        (completion,) = await service.complete([job])
        response = await run_if_long(
            num_logprobs([completion]),
            lambda: chat_response(completion, wanted, model=model, created=created),
        )
        return json_response(response)

    def _tool_use(self, request: ChatCompletionRequest) -> ToolUse | None:
        try:
            return tool_use(request, self._format)
        except InvalidRequest as error:
            if request.functions:
                raise in_legacy_words(error) from error
            raise

    def _reader_options(
        self, request: ChatCompletionRequest, prompt: ChatPrompt, use: ToolUse | None
    ) -> ReaderOptions:
        shows_all = request.skip_special_tokens is False
        return ReaderOptions(
            format=self._format,
            prompt=prompt,
            use=use,
            separate_reasoning=request.separate_reasoning is not False,
            include_reasoning=request.include_reasoning is not False,
            functions=bool(request.functions),
            hidden=None if shows_all else self._hidden[use is not None],
        )

    async def _job(self, request: ChatCompletionRequest, options: ReaderOptions) -> Job:
        fields, renames = _chat_sampling(request)
        if self._format.hides_marks(with_tools=options.use is not None):
            fields["skip_special_tokens"] = False
        try:
            await self._constrain(options, fields, renames)
        except InvalidRequest as error:
            raise renamed(error, renames) from error
        id = request_id("chatcmpl", request, self._service)
        return make_job(self._service, request, options.prompt, id, fields, renames)

    async def _constrain(
        self, options: ReaderOptions, fields: dict[str, Any], renames: dict[str, str]
    ) -> None:
        """Make one grammar of what the answer is to look like, its tools, and its reasoning."""
        format, use = self._format, options.use
        given: Grammar | None = fields.get("grammar")
        if given is None and (use is None or use.is_free):
            return
        if use is None and not format.reasons:
            return
        lark = None
        if given is not None:
            token_of = format.tokenizer.token_of
            lark = await trio.to_thread.run_sync(lark_of, given, token_of, abandon_on_cancel=True)
        if use is not None:
            if given is None or use.required:
                renames["grammar"] = "functions" if options.functions else "tools"
            assert format.family is not None
            use = attrs.evolve(use, answer=lark)
            lark = format.family.grammar(use, format.tokenizer.token_of, format.template)
        assert lark is not None
        if format.reasons:
            end = await self._end_of_prompt(options.prompt)
            if not end.rstrip().endswith(CLOSE):
                inside = opens_reasoning(end, options.prompt)
                lark = after_reasoning(lark, format.tokenizer.token_of, inside=inside)
        fields["grammar"] = Grammar("grammar", lark)

    async def _end_of_prompt(self, prompt: ChatPrompt) -> str:
        template = self._format.tokenizer.chat_template
        if template is None:
            return ""  # The engine will refuse it.
        rendered = await trio.to_thread.run_sync(template.render, prompt, abandon_on_cancel=True)
        return rendered[-_END_OF_PROMPT:]

    def _wanted(
        self, request: ChatCompletionRequest, job: Job, options: ReaderOptions
    ) -> WantedChat:
        prompt = options.prompt
        last = prompt.messages[-1]
        role = "assistant" if prompt.add_generation_prompt else last["role"]
        echo = ""
        if request.echo and last["role"] == role:
            content = last.get("content") or ""
            texts = content if isinstance(content, str) else [part["text"] for part in content]
            echo = "".join(texts)
        return WantedChat(
            tokenizer=self._service.engine.tokenizer,
            options=options,
            n=job.params.n,
            role=role,
            echo=echo,
            top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            prompt_logprobs=request.prompt_logprobs,
            token_ids=bool(request.return_token_ids),
            prompt_text=bool(request.return_prompt_text),
            tokens_as_ids=bool(request.return_tokens_as_token_ids),
        )


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
