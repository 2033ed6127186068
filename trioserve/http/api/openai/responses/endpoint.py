"""Handlers of ``/v1/responses``. A kept response belongs to the key that it was made with.

:mod:`trioserve.http.api.openai.responses.conversation` turns a request into a chat;
:mod:`trioserve.http.api.openai.responses.writer` writes the answer.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

import attrs
import msgspec
import quart

from trioserve.http.api.errors import ResponseNotFound
from trioserve.http.api.jobs import PromptJob
from trioserve.http.api.openai.chat.answer import ReaderOptions
from trioserve.http.api.openai.chat.preparation import ChatPreparation
from trioserve.http.api.openai.chat.writer import WantedChat
from trioserve.http.api.openai.responses.conversation import (
    WORDS,
    chat_request,
    includes_logprobs,
    input_items,
)
from trioserve.http.api.openai.responses.items import InputItem
from trioserve.http.api.openai.responses.replies import (
    DeletedResponse,
    FunctionToolReply,
    InputItemList,
    InputTokensReply,
    ReasoningSettings,
    ResponseReply,
)
from trioserve.http.api.openai.responses.schemas import (
    InputItemsQuery,
    InputTokensRequest,
    ResponseQuery,
    ResponsesRequest,
    TextOptions,
)
from trioserve.http.api.openai.responses.store import MAX_CONVERSATION_BYTES
from trioserve.http.api.openai.responses.turns import (
    encoded_turn,
    input_of,
    items_of,
    listed_items,
    response_of,
)
from trioserve.http.api.openai.responses.writer import ResponseMaker, ResponseWriter
from trioserve.http.api.openai.structured_schemas import TextFormat
from trioserve.http.api.service import Service, json_response, response_of_view
from trioserve.http.api.sse import Framing
from trioserve.http.api.threads import num_in_entries, run_if_long
from trioserve.http.api.utilities.tokens import TokenEndpoints
from trioserve.protocol.errors import InvalidRequest

DEFAULT_LIMIT = 20
"""Items of an input that are listed at a time."""
_SPARE_DEPTH = 100
"""Levels by which a response is shallower than the deepest that can be parsed."""


_PROMPT_FIELDS = (
    *("input", "instructions", "text", "tools", "tool_choice", "parallel_tool_calls", "reasoning"),
)


@attrs.frozen(kw_only=True)
class _Asked:
    """A request, and the conversation before it."""

    request: ResponsesRequest
    model: str
    history: list[InputItem]
    job: PromptJob
    options: ReaderOptions
    owner: str | None
    """Owner of the request's key."""


class ResponseEndpoints:
    """The handlers, over one service."""

    def __init__(self, service: Service, chats: ChatPreparation, tokens: TokenEndpoints) -> None:
        self._service = service
        self._chats = chats
        self._tokens = tokens

    async def create_response(self) -> quart.Response:
        """Handle ``POST /v1/responses``."""
        request = await self._service.read(ResponsesRequest)
        with self._service.deadline(request.timeout).enforced():
            asked = await self._asked(request)
            maker = self._maker(asked)
            if request.stream:
                return self._streamed(asked, maker)
            return json_response(await self._whole(asked, maker))

    async def response_input_tokens(self) -> quart.Response:
        """Handle ``POST /v1/responses/input_tokens``."""
        asked = await self._service.read(InputTokensRequest)
        self._service.model(asked.model)
        request = ResponsesRequest(
            **{name: getattr(asked, name) for name in _PROMPT_FIELDS},
        )
        history = await self._history(asked.previous_response_id)
        with WORDS.translated():
            ids = await self._tokens.chat_ids(chat_request(request, history))
        return json_response(InputTokensReply(input_tokens=len(ids)))

    async def kept_response(self, response_id: str) -> quart.Response:
        """Handle ``GET /v1/responses/{response_id}``."""
        self._service.read_query(ResponseQuery)
        turn = await self._kept(response_id)
        return response_of_view(response_of(turn))

    async def delete_response(self, response_id: str) -> quart.Response:
        """Handle ``DELETE /v1/responses/{response_id}``: responses that continue it stay."""
        service = self._service
        if not await service.server_api.drop_response(service.record.key, response_id):
            raise ResponseNotFound(response_id)
        return json_response(DeletedResponse(id=response_id))

    async def response_input_items(self, response_id: str) -> quart.Response:
        """Handle ``GET /v1/responses/{response_id}/input_items``."""
        query = self._service.read_query(InputItemsQuery)
        items = input_of(await self._kept(response_id))
        if query.order != "asc":
            items.reverse()
        if query.after is not None:
            ids = [item.id for item in items]
            if query.after not in ids:
                raise InvalidRequest(
                    f"after names {query.after!r}, which isn't in the list", param="after"
                )
            items = items[ids.index(query.after) + 1 :]
        shown = items[: query.limit or DEFAULT_LIMIT]
        return json_response(
            InputItemList(
                data=shown,
                first_id=shown[0].id if shown else None,
                last_id=shown[-1].id if shown else None,
                has_more=len(shown) < len(items),
            )
        )

    async def cancel_response(self, response_id: str) -> quart.Response:
        """Handle ``POST /v1/responses/{response_id}/cancel``: kept responses have ended."""
        await self._kept(response_id)
        raise InvalidRequest("Cannot cancel a synchronous response: it ends when its client leaves")

    async def _kept(self, id: str) -> bytes:
        """Return the kept data of a response."""
        service = self._service
        turns = await service.server_api.kept_conversation(service.record.key, id)
        if not turns:
            raise ResponseNotFound(id)
        return turns[-1]

    async def _asked(self, request: ResponsesRequest) -> _Asked:
        model = self._service.model(request.model)
        if request.stream_options is not None and not request.stream:
            raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
        history = await self._history(request.previous_response_id)
        id = f"resp_{request.request_id or uuid.uuid4().hex}"
        with WORDS.translated():
            prepared = await self._chats.prepare(chat_request(request, history), id)
        return _Asked(
            request=request,
            model=model,
            history=history,
            job=WORDS.job(prepared.job),
            options=prepared.options,
            owner=self._service.record.key,
        )

    async def _history(self, previous: str | None) -> list[InputItem]:
        """Return the items of the conversation that a request continues."""
        if previous is None:
            return []
        service = self._service
        turns = await service.server_api.kept_conversation(service.record.key, previous)
        if not turns:
            raise InvalidRequest(
                f"Previous response with id {previous!r} not found.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return items_of(turns)

    def _maker(self, asked: _Asked) -> ResponseMaker:
        request = asked.request
        wanted = WantedChat(
            tokenizer=self._service.engine.tokenizer,
            options=asked.options,
            top_logprobs=(request.top_logprobs or 0) if includes_logprobs(request) else None,
        )
        reply = _empty_response(asked)
        _check_depth(reply)
        return ResponseMaker(reply, wanted)

    def _streamed(self, asked: _Asked, maker: ResponseMaker) -> quart.Response:
        async def finish() -> None:
            await self._keep(asked, maker.finish())

        writer = ResponseWriter(maker)
        framing = Framing(last=b"", error=writer.failure)
        return self._service.stream([asked.job], writer, framing, before_end=finish)

    async def _whole(self, asked: _Asked, maker: ResponseMaker) -> ResponseReply:
        ((stream, chunks),) = await self._service.chunks([asked.job])

        def make() -> ResponseReply:
            maker.begin(stream)
            for chunk in chunks:
                maker.answer.add(chunk)
            return maker.finish()

        weight = sum(num_in_entries(chunk.logprobs) for chunk in chunks)
        reply = await run_if_long(weight, make)
        await self._keep(asked, reply)
        return reply

    async def _keep(self, asked: _Asked, reply: ResponseReply) -> None:
        """Keep a response, if the request wants that and it isn't too large."""
        if asked.request.store is False:
            return
        items = listed_items(input_items(asked.request))
        previous = asked.request.previous_response_id
        is_kept = await self._keep_turn(asked, encoded_turn(reply, items), previous)
        if not is_kept and previous is not None:
            # The response that it continues may have been forgotten meanwhile.
            await self._keep_turn(asked, encoded_turn(reply, items, asked.history), None)

    async def _keep_turn(self, asked: _Asked, turn: bytes, previous: str | None) -> bool:
        if len(turn) > MAX_CONVERSATION_BYTES:
            return False
        server_api, id = self._service.server_api, asked.job.request_id
        return await server_api.keep_response(asked.owner, id, turn, previous)


def _empty_response(asked: _Asked) -> ResponseReply:
    """Return the response before any output: the request's fields, and defaults."""
    request, params = asked.request, asked.job.params
    text = request.text or TextOptions()
    effort = None if request.reasoning is None else request.reasoning.effort
    return ResponseReply(
        id=asked.job.request_id,
        created_at=int(time.time()),
        model=asked.model,
        previous_response_id=request.previous_response_id,
        instructions=request.instructions,
        store=request.store is not False,
        metadata=request.metadata or {},
        tools=[
            FunctionToolReply(
                name=tool.name,
                description=tool.description,
                parameters=tool.parameters,
                strict=tool.strict,
            )
            for tool in request.tools or ()
        ],
        tool_choice=request.tool_choice or "auto",
        parallel_tool_calls=request.parallel_tool_calls is not False,
        text=TextOptions(format=text.format or TextFormat(), verbosity=text.verbosity),
        reasoning=ReasoningSettings(effort=effort),
        max_output_tokens=request.max_output_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_logprobs=request.top_logprobs or 0,
    )


def _check_depth(reply: ResponseReply) -> None:
    """Refuse schemas that were just shallow enough to be parsed and are too deep to be encoded."""
    held: Any = reply
    for _ in range(_SPARE_DEPTH):
        held = [held]
    try:
        msgspec.json.encode(held)
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
