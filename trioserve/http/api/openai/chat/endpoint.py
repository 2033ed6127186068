"""Handler of ``/v1/chat/completions``.

:mod:`trioserve.http.api.openai.chat.answer` reads the output;
:mod:`trioserve.http.api.openai.chat.writer` writes it in OpenAI's form.
"""

from __future__ import annotations

import time

import quart

from trioserve.http.api.openai.chat.legacy import with_tools
from trioserve.http.api.openai.chat.preparation import ChatPreparation, PreparedChat
from trioserve.http.api.openai.chat.schemas import ChatCompletionRequest
from trioserve.http.api.openai.chat.writer import ChatWriter, WantedChat, chat_response
from trioserve.http.api.openai.fields import (
    check_stream_options,
    continuous_usage,
    include_usage,
    request_id,
)
from trioserve.http.api.service import Service, json_response
from trioserve.http.api.threads import num_logprobs, run_if_long


class ChatEndpoints:
    """The handler, over one service."""

    def __init__(self, service: Service, chats: ChatPreparation) -> None:
        self._service = service
        self._chats = chats

    async def chat_completions(self) -> quart.Response:
        """Handle ``POST /v1/chat/completions``."""
        request = with_tools(await self._service.read(ChatCompletionRequest))
        with self._service.deadline(request.timeout).enforced():
            return await self._answer(request)

    async def _answer(self, request: ChatCompletionRequest) -> quart.Response:
        service = self._service
        model = service.model(request.model)
        check_stream_options(request)
        chat = await self._chats.prepare(request, request_id("chatcmpl", request, service))
        wanted = self._wanted(request, chat)
        created = int(time.time())
        if request.stream:
            writer = ChatWriter(
                id=chat.job.request_id,
                model=model,
                created=created,
                include_usage=include_usage(request),
                continuous_usage=continuous_usage(request),
                wanted=wanted,
            )
            return service.stream([chat.job], writer)
        (completion,) = await service.complete([chat.job])
        response = await run_if_long(
            num_logprobs([completion]),
            lambda: chat_response(completion, wanted, model=model, created=created),
        )
        return json_response(response)

    def _wanted(self, request: ChatCompletionRequest, chat: PreparedChat) -> WantedChat:
        prompt = chat.options.prompt
        last = prompt.messages[-1]
        role = "assistant" if prompt.add_generation_prompt else last["role"]
        echo = ""
        if request.echo and last["role"] == role:
            content = last.get("content") or ""
            texts = content if isinstance(content, str) else [part["text"] for part in content]
            echo = "".join(texts)
        return WantedChat(
            tokenizer=self._service.engine.tokenizer,
            options=chat.options,
            n=chat.job.params.n,
            role=role,
            echo=echo,
            eos_token_ids=self._service.engine.eos_token_ids,
            asked_only=bool(request.logprob_token_ids),
            top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            prompt_logprobs=request.prompt_logprobs,
            token_ids=bool(request.return_token_ids),
            prompt_text=bool(request.return_prompt_text),
            tokens_as_ids=bool(request.return_tokens_as_token_ids),
        )
