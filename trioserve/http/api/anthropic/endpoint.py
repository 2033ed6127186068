"""Handlers of Anthropic's ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

import quart

from trioserve.http.api.anthropic.fields import WORDS, chat_request
from trioserve.http.api.anthropic.schemas import CountTokensRequest, MessagesRequest, TokenCount
from trioserve.http.api.anthropic.writer import FRAMING, MessageWriter, message_reply
from trioserve.http.api.openai.chat.preparation import ChatPreparation
from trioserve.http.api.service import Service, json_response
from trioserve.http.api.utilities.tokens import TokenEndpoints


class MessageEndpoints:
    """The handlers, over one service."""

    def __init__(self, service: Service, chats: ChatPreparation, tokens: TokenEndpoints) -> None:
        self._service = service
        self._chats = chats
        self._tokens = tokens

    async def messages(self) -> quart.Response:
        """Handle ``POST /v1/messages``."""
        request = await self._service.read(MessagesRequest)
        with self._service.deadline(None).enforced():
            return await self._answer(request)

    async def _answer(self, request: MessagesRequest) -> quart.Response:
        service = self._service
        model = service.model(request.model)
        with WORDS.translated():
            chat = chat_request(request, self._chats.format)
            prepared = await self._chats.prepare(chat, f"msg_{service.record.request_id}")
        job, options = WORDS.job(prepared.job), prepared.options
        if request.stream:
            writer = MessageWriter(id=job.request_id, model=model, options=options)
            return service.stream([job], writer, FRAMING)
        (completion,) = await service.complete([job])
        return json_response(message_reply(completion, options, model=model))

    async def count_message_tokens(self) -> quart.Response:
        """Handle ``POST /v1/messages/count_tokens``."""
        request = await self._service.read(CountTokensRequest)
        self._service.model(request.model)
        with WORDS.translated():
            ids = await self._tokens.chat_ids(chat_request(request, self._chats.format))
        return json_response(TokenCount(len(ids)))
