"""The routes of Anthropic's ``/v1/messages``."""

from __future__ import annotations

from trioserve.http.api.anthropic.schemas import (
    CountTokensRequest,
    MessageReply,
    MessagesRequest,
    StreamEvent,
    TokenCount,
)
from trioserve.http.api.route import GENERATING, Route

ROUTES = (
    Route(
        method="POST",
        rule="/v1/messages",
        handler="messages",
        summary="Answer a conversation, with Anthropic's fields",
        group="Generation",
        peers="Anthropic, vLLM, SGLang",
        request=MessagesRequest,
        response=MessageReply,
        events=StreamEvent,
        errors=(404, *GENERATING),
    ),
    Route(
        method="POST",
        rule="/v1/messages/count_tokens",
        handler="count_message_tokens",
        summary="How many tokens a conversation has, with Anthropic's fields",
        group="Tokens",
        peers="Anthropic, vLLM, SGLang",
        request=CountTokensRequest,
        response=TokenCount,
        errors=(404,),
    ),
)
