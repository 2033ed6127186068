"""Handlers of Ollama's ``/api/chat``, ``/api/generate``, ``/api/embed`` and ``/api/embeddings``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import quart
import trio

from trioserve.http.api.generations import renamed
from trioserve.http.api.ollama.fields import (
    CHAT_WORDS,
    GENERATE_WORDS,
    generate_request,
    ollama_chat_request,
    raw_request,
    served_name,
)
from trioserve.http.api.ollama.schemas import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbeddingsResponse,
    OllamaEmbedRequest,
    OllamaEmbedResponse,
    OllamaGenerateRequest,
    OllamaRequest,
)
from trioserve.http.api.ollama.writer import ChatLines, GenerateLines, OllamaWriter, nanoseconds
from trioserve.http.api.openai.chat.answer import ReaderOptions
from trioserve.http.api.openai.chat.preparation import ChatPreparation, PreparedChat, chat_sampling
from trioserve.http.api.openai.chat.schemas import ChatCompletionRequest
from trioserve.http.api.openai.chat.writer import WantedChat
from trioserve.http.api.openai.fields import make_job
from trioserve.http.api.pooling.asked import Asked
from trioserve.http.api.pooling.embeddings import run_if_many
from trioserve.http.api.service import CURLS_TYPE, Service, json_response
from trioserve.http.api.threads import num_logprobs, run_if_long
from trioserve.pooling.inputs import Item, as_items
from trioserve.pooling.results import Embeddings
from trioserve.protocol.errors import InvalidRequest
from trioserve.requests.prompts import ChatPrompt, TextPrompt


class OllamaEndpoints:
    """The handlers, over one service."""

    def __init__(self, service: Service, chats: ChatPreparation) -> None:
        self._service = service
        self._chats = chats
        self._all_text = ReaderOptions(
            format=chats.format, prompt=ChatPrompt(messages=()), separate_reasoning=False
        )
        """Options for reading outputs that are all text."""

    async def ollama_chat(self) -> quart.Response:
        """Handle ``POST /api/chat``."""
        service = self._service
        request = await service.read(OllamaChatRequest, CURLS_TYPE)
        with service.deadline(None).enforced():
            model = served_name(request.model, service)
            if not request.messages:
                return json_response(self._writer(ChatLines, model).loaded())
            with CHAT_WORDS.translated():
                chat = ollama_chat_request(request, model, self._chats.format)
                prepared = await self._chats.prepare(chat, self._id("chatcmpl"))
            job = CHAT_WORDS.job(prepared.job)
            return await self._answer(
                request, ChatLines, model, PreparedChat(job, prepared.options)
            )

    async def ollama_generate(self) -> quart.Response:
        """Handle ``POST /api/generate``."""
        service = self._service
        request = await service.read(OllamaGenerateRequest, CURLS_TYPE)
        with service.deadline(None).enforced():
            model = served_name(request.model, service)
            if not request.prompt:
                return json_response(self._writer(GenerateLines, model).loaded())
            with GENERATE_WORDS.translated():
                if request.raw:
                    prepared = self._raw(raw_request(request, model), request.prompt)
                else:
                    chat = generate_request(request, model, self._chats.format)
                    prepared = await self._chats.prepare(chat, self._id("cmpl"))
            job = GENERATE_WORDS.job(prepared.job)
            prepared = PreparedChat(job, prepared.options)
            return await self._answer(request, GenerateLines, model, prepared)

    def _id(self, prefix: str) -> str:
        return f"{prefix}-{self._service.record.request_id}"

    def _raw(self, chat: ChatCompletionRequest, prompt: str) -> PreparedChat:
        """Return the job of a prompt that is the whole text; its output is all text."""
        fields, renames = chat_sampling(chat)
        params = self._service.sampling(fields, renames)
        job = make_job(self._service, chat, TextPrompt(prompt), self._id("cmpl"), params, renames)
        return PreparedChat(job, self._all_text)

    async def _answer(
        self, request: OllamaRequest, kind: type[OllamaWriter], model: str, chat: PreparedChat
    ) -> quart.Response:
        service = self._service
        top_logprobs = (request.top_logprobs or 0) if request.logprobs else None
        writer = self._writer(kind, model, chat.options, top_logprobs)
        if request.stream is not False:
            return service.stream([chat.job], writer, writer.framing)
        (completion,) = await service.complete([chat.job])
        (times,) = service.record.times
        now = trio.current_time()
        reply = await run_if_long(
            num_logprobs([completion]), lambda: writer.server_api(completion, times, now)
        )
        return json_response(reply)

    def _writer(
        self,
        kind: type[OllamaWriter],
        model: str,
        options: ReaderOptions | None = None,
        top_logprobs: int | None = None,
    ) -> OllamaWriter:
        tokenizer = self._service.engine.tokenizer
        wanted = WantedChat(
            tokenizer=tokenizer, options=options or self._all_text, top_logprobs=top_logprobs
        )
        return kind(model=model, wanted=wanted, started=self._service.record.started)

    async def ollama_embed(self) -> quart.Response:
        """Handle ``POST /api/embed``."""
        service = self._service
        request = await service.read(OllamaEmbedRequest, CURLS_TYPE)
        with service.deadline(None).enforced():
            model = served_name(request.model, service)
            truncate = None if request.truncate is False else -1
            found = await self._embedded(
                model,
                as_items(request.input),
                "input",
                dimensions=request.dimensions,
                normalize=True,
                truncate_prompt_tokens=truncate,
            )
            duration = nanoseconds(trio.current_time() - service.record.started)

            def answer() -> msgspec.Raw:
                response = OllamaEmbedResponse(
                    model=model,
                    embeddings=found.vectors.tolist(),
                    total_duration=duration,
                    prompt_eval_count=found.usage.prompt_tokens,
                )
                return msgspec.Raw(msgspec.json.encode(response))

            return json_response(await run_if_many(found.vectors.size, answer))

    async def ollama_embeddings(self) -> quart.Response:
        """Handle ``POST /api/embeddings``."""
        service = self._service
        request = await service.read(OllamaEmbeddingsRequest, CURLS_TYPE)
        with service.deadline(None).enforced():
            model = served_name(request.model, service)
            items = as_items(request.prompt, "prompt")
            try:
                found = await self._embedded(
                    model, items, "prompt", normalize=False, truncate_prompt_tokens=-1
                )
            except InvalidRequest as error:
                raise renamed(error, {"input": "prompt"}) from error
            return json_response(OllamaEmbeddingsResponse(found.vectors[0].tolist()))

    async def _embedded(
        self, model: str, items: Sequence[Item], field: str, **options: Any
    ) -> Embeddings:
        """Return the vectors of ``items``, which are ``field`` of the request, for ``model``."""
        service = self._service
        adapter, _ = service.adapter(model, None)
        service.check_number_of_prompts(len(items), field)
        service.note_texts(items)
        asked = Asked.of(service, "embd", None, None)
        found = await service.engine.embed(items, adapter=adapter, **options, **asked.options)
        service.record.usage = found.usage
        return found
