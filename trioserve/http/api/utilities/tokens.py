"""Handlers of the tokenizer: texts and chats to token ids, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import quart
import trio

from trioserve.http.api.openai.chat.format import ChatFormat
from trioserve.http.api.openai.chat.messages import ChatMessage
from trioserve.http.api.openai.chat.prompt import chat_prompt
from trioserve.http.api.openai.chat.schemas import ChatCompletionRequest
from trioserve.http.api.openai.chat.tools import tool_use
from trioserve.http.api.schema.reading import one_or_several
from trioserve.http.api.service import Service, json_response
from trioserve.http.api.utilities.schemas import (
    CHAT_FIELDS,
    ApplyTemplateRequest,
    ApplyTemplateResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from trioserve.protocol.errors import InvalidRequest
from trioserve.text.tokenizer import Tokenizer
from trioserve.text.tokenizer_task import INLINE_CHARACTERS

MAX_THREADS = 2
"""Threads for tokenizing; few, as in the engine, because the worker needs the cores, too."""
_CHARACTERS_PER_TOKEN = 4

Result = TypeVar("Result")


class TokenEndpoints:
    """The handlers, over one service. Work that would block the event loop runs in a thread."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._format = ChatFormat.of(service.engine.tokenizer, service.config)
        self._limiter = trio.CapacityLimiter(MAX_THREADS)

    async def tokenize(self) -> quart.Response:
        """Handle ``POST /tokenize`` and ``POST /v1/tokenize``."""
        service = self._service
        request = await service.read(TokenizeRequest)
        service.model(request.model)
        if isinstance(request.prompt, list):
            service.check_number_of_prompts(len(request.prompt), "prompt")
        texts = await self._texts(request)
        special = bool(request.add_special_tokens)
        if request.messages is None:
            special = request.add_special_tokens is not False
        ids, names = await self._run(
            sum(map(len, texts)), lambda: _tokenize(request, texts, special, self._format)
        )
        listed = isinstance(request.prompt, list)
        counts = [len(each) for each in ids]
        return json_response(
            TokenizeResponse(
                count=counts if listed else counts[0],
                max_model_len=service.engine.max_model_len,
                tokens=[*ids] if listed else [*ids[0]],
                token_strs=None if names is None else [*names] if listed else [*names[0]],
            )
        )

    async def apply_template(self) -> quart.Response:
        """Handle ``POST /apply-template``."""
        service = self._service
        request = await service.read(ApplyTemplateRequest)
        service.model(request.model)
        text = await self._render(_chat_of(request, request.messages))
        _check_length(len(text), "messages", self._format.tokenizer)
        return json_response(ApplyTemplateResponse(text))

    async def detokenize(self) -> quart.Response:
        """Handle ``POST /detokenize`` and ``POST /v1/detokenize``."""
        service = self._service
        request = await service.read(DetokenizeRequest)
        service.model(request.model)
        tokenizer = service.engine.tokenizer
        lists, listed = one_or_several(request.tokens, "tokens")
        if listed:
            service.check_number_of_prompts(len(lists), "tokens")
        if not tokenizer.has_text:
            raise InvalidRequest(
                "tokens: the server has no tokenizer (--skip-tokenizer-init)", param="tokens"
            )
        _check_ids(lists, tokenizer)
        skip = bool(request.skip_special_tokens)
        total, most = sum(map(len, lists)), tokenizer.max_characters
        if total > most:
            raise InvalidRequest(
                f"tokens has {total} ids; at most {most} are decoded at once", param="tokens"
            )
        weight = _CHARACTERS_PER_TOKEN * total
        texts = await self._run(
            weight, lambda: [tokenizer.decode(ids, skip_special_tokens=skip) for ids in lists]
        )
        answer = texts if listed else texts[0]
        return json_response(DetokenizeResponse(prompt=answer, text=answer))

    async def tokenizer_info(self) -> quart.Response:
        """Handle ``GET /tokenizer_info``."""
        engine = self._service.engine
        tokenizer = engine.tokenizer
        template = tokenizer.chat_template
        added = tokenizer.backend.get_added_tokens_decoder()
        return json_response(
            TokenizerInfo(
                tokenizer_class=f"tokenizers.{type(tokenizer.backend.model).__name__}",
                vocab_size=tokenizer.vocab_size,
                model_max_length=engine.max_model_len,
                special_tokens={added[id].content: id for id in sorted(tokenizer.special_ids)},
                bos_token=tokenizer.bos_token,
                eos_token=tokenizer.eos_token,
                eos_token_ids=list(engine.eos_token_ids),
                chat_template=None if template is None else template.source,
            )
        )

    async def chat_ids(self, chat: ChatCompletionRequest) -> list[int]:
        """Return the token ids of the prompt of ``chat``.

        Raises:
            InvalidRequest: it makes none; ``param`` is a field of it.
        """

        text = await self._render(chat)
        return await self._run(
            len(text), lambda: _encode(self._format.tokenizer, text, "messages", special=False)
        )

    async def _texts(self, request: TokenizeRequest) -> list[str]:
        """Return the texts to encode."""
        if request.messages is None:
            return [request.prompt] if isinstance(request.prompt, str) else request.prompt or []
        return [await self._render(_chat_of(request, request.messages))]

    async def _render(self, chat: ChatCompletionRequest) -> str:
        """Return the text of a chat.

        Raises:
            InvalidRequest: there is no chat template, or it refuses the messages.
        """
        format = self._format
        if format.tokenizer.chat_template is None:
            raise InvalidRequest("the model has no chat template", param="messages")
        prompt = chat_prompt(chat, format, tool_use(chat, format))
        if prompt.others:
            raise InvalidRequest("only parts of text have tokens of their own", param="messages")
        return await format.tokenizer.render(prompt)

    async def _run(self, weight: int, work: Callable[[], Result]) -> Result:
        """Return the result of ``work``: run here if it is short (``weight`` in characters), else
        in a thread.
        """
        if weight <= INLINE_CHARACTERS:
            return work()
        return await trio.to_thread.run_sync(work, limiter=self._limiter, abandon_on_cancel=True)


def _chat_of(
    request: TokenizeRequest | ApplyTemplateRequest, messages: list[ChatMessage]
) -> ChatCompletionRequest:
    """Return the chat of the prompt that a request asks for."""
    fields = {name: getattr(request, name) for name in CHAT_FIELDS}
    return ChatCompletionRequest(messages=messages, **fields)


def _check_length(number: int, param: str, tokenizer: Tokenizer) -> None:
    if number > tokenizer.max_characters:
        raise InvalidRequest(
            f"{param} has {number} characters; at most {tokenizer.max_characters} are tokenized "
            "at once",
            param=param,
        )


def _tokenize(
    request: TokenizeRequest, texts: list[str], special: bool, format: ChatFormat
) -> tuple[list[list[int]], list[list[str]] | None]:
    """Return the ids of each text and, if asked for, the vocabulary's strings of the tokens."""
    tokenizer = format.tokenizer
    param = "prompt" if request.messages is None else "messages"
    _check_length(sum(map(len, texts)), param, tokenizer)
    ids = [_encode(tokenizer, text, param, special=special) for text in texts]
    if not request.return_token_strs:
        return ids, None
    return ids, [[*map(tokenizer.name_of, each)] for each in ids]


def _encode(tokenizer: Tokenizer, text: str, param: str, *, special: bool) -> list[int]:
    """Return the ids of a text; an error names ``param``."""
    try:
        return tokenizer.encode(text, add_special_tokens=special)
    except InvalidRequest as error:
        raise InvalidRequest(str(error), param=param) from error


def _check_ids(lists: Sequence[list[int]], tokenizer: Tokenizer) -> None:
    largest = max((max(ids) for ids in lists if ids), default=0)
    if largest >= tokenizer.vocab_size:
        raise InvalidRequest(
            f"token id {largest} is not in the vocabulary of {tokenizer.vocab_size}", param="tokens"
        )
