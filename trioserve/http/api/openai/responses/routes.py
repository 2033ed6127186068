"""The routes of ``/v1/responses``."""

from __future__ import annotations

from trioserve.http.api.openai.responses.events import ResponseEvent
from trioserve.http.api.openai.responses.replies import (
    DeletedResponse,
    InputItemList,
    InputTokensReply,
    ResponseReply,
)
from trioserve.http.api.openai.responses.schemas import (
    InputItemsQuery,
    InputTokensRequest,
    ResponseQuery,
    ResponsesRequest,
)
from trioserve.http.api.route import GENERATING, Route

ROUTES = (
    Route(
        method="POST",
        rule="/v1/responses",
        handler="create_response",
        summary="Answer a conversation, and keep the answer for later ones",
        group="Generation",
        peers="OpenAI, vLLM, SGLang",
        request=ResponsesRequest,
        response=ResponseReply,
        events=ResponseEvent,
        errors=(404, *GENERATING),
    ),
    Route(
        method="POST",
        rule="/v1/responses/input_tokens",
        handler="response_input_tokens",
        summary="How many tokens a response's prompt has",
        group="Tokens",
        peers="OpenAI",
        request=InputTokensRequest,
        response=InputTokensReply,
        errors=(400, 404),
    ),
    Route(
        method="GET",
        rule="/v1/responses/<response_id>",
        handler="kept_response",
        summary="A response that is kept",
        group="Generation",
        peers="OpenAI, vLLM, SGLang",
        query=ResponseQuery,
        response=ResponseReply,
        errors=(400, 404),
    ),
    Route(
        method="DELETE",
        rule="/v1/responses/<response_id>",
        handler="delete_response",
        summary="Forget a response that is kept",
        group="Generation",
        peers="OpenAI, TensorRT-LLM",
        response=DeletedResponse,
        errors=(404,),
    ),
    Route(
        method="GET",
        rule="/v1/responses/<response_id>/input_items",
        handler="response_input_items",
        summary="The items of a response's own input",
        group="Generation",
        peers="OpenAI",
        query=InputItemsQuery,
        response=InputItemList,
        errors=(400, 404),
    ),
    Route(
        method="POST",
        rule="/v1/responses/<response_id>/cancel",
        handler="cancel_response",
        summary="Refused: a kept response has ended, and no response is made in the background",
        group="Generation",
        peers="OpenAI, vLLM, SGLang",
        response=ResponseReply,
        errors=(400, 404),
    ),
)
