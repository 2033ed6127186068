"""docs/api.md lists every endpoint and every field, with what it means or why it is refused."""

from __future__ import annotations

import importlib
import re
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from anthropic.types import (
    message_count_tokens_params,
    message_create_params,
    tool_param,
    user_message_param,
)
from ollama import _types as ollama_types
from openai.types import completion_create_params as text_params
from openai.types import embedding_create_params, responses, shared_params
from openai.types.audio import transcription_create_params, translation_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import (
    input_item_list_params,
    response_create_params,
    response_input_item_param,
    response_retrieve_params,
)

from trioserve.http.api.anthropic.inputs import InputMessage
from trioserve.http.api.anthropic.schemas import CountTokensRequest, MessagesRequest, ToolDefinition
from trioserve.http.api.console.routes import ROUTES as CONSOLE
from trioserve.http.api.errors import ERROR_STATUSES
from trioserve.http.api.ollama.model_schemas import ShowRequest
from trioserve.http.api.ollama.schemas import (
    OllamaChatRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
)
from trioserve.http.api.openai.audio.schemas import TranscriptionForm, TranslationForm
from trioserve.http.api.openai.chat.schemas import ChatCompletionRequest
from trioserve.http.api.openai.completions.schemas import CompletionRequest
from trioserve.http.api.openai.responses.items import (
    CallItem,
    CallOutputItem,
    InputText,
    MessageItem,
    OutputText,
    ReasoningItem,
)
from trioserve.http.api.openai.responses.schemas import (
    AllowedFunctions,
    FunctionTool,
    InputItemsQuery,
    NamedSchemaFormat,
    ReasoningOptions,
    ResponseQuery,
    ResponsesRequest,
    TextOptions,
)
from trioserve.http.api.openapi import openapi_path
from trioserve.http.api.pooling.embedding_schemas import EmbeddingRequest
from trioserve.http.api.route import GROUPS
from trioserve.http.api.routes import ROUTES
from trioserve.http.api.schema.reading import struct_classes
from trioserve.http.api.sglang.schemas import GenerateRequest, NativeSampling

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "api.md").read_text()
OWN = {
    *("pooling", "timeout", "new_requests", "speculative", "UpdateWeightsRequest.mode"),
    *("beam_width", "early_stopping", "AddWorkerRequest.device"),
    *("AddWorkerRequest.role", "return_context_logits", "return_generation_logits"),
    *("UpdateTensorsRequest.mode", "UpdateTensorsRequest.model_path"),
    *("LiveQuery.interval", "LiveQuery.requests", "LiveQuery.nodes"),
    *("LiveQuery.pictures", "ApplyTemplateRequest.continue_final_message"),
    *("ApplyTemplateRequest.reasoning_effort", "ApplyTemplateRequest.chat_template"),
    "condition_on_previous_text",
}
"""Fields of requests that no peer has."""
THEIRS = {"OpenSessionRequest.timeout"}
"""Fields of that name that a peer has nevertheless."""


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that makes the tables."""
    monkeypatch.syspath_prepend(str(DOCS / "_ext"))
    return importlib.import_module("api_tables")


@pytest.mark.parametrize("side", ["request", "answer"])
def test_every_field_says_what_it_means(tables: Any, side: str) -> None:
    classes = getattr(tables, f"{side}_classes")()
    assert len(classes) > 15
    silent = [
        f"{cls.__name__}.{field.name}"
        for cls in classes
        for field in tables.fields_of(cls)
        if not (field.refused if field.accepted else field.meaning)
    ]
    assert not silent


def test_every_field_is_in_a_table(tables: Any) -> None:
    sections = re.split(r"^### ", "\n".join(tables.field_lines()), flags=re.MULTILINE)
    texts = {section.split("\n")[0]: section for section in sections[1:]}
    (shared,) = [text for title, text in texts.items() if title.startswith("Fields of both")]
    titles = {route.request: f"`{route.method} {route.rule}`" for route in ROUTES}
    for cls in tables.request_classes():
        text = texts[titles.get(cls, cls.__name__)]
        for field in tables.fields_of(cls):
            name = f"`{field.name}`"
            assert name in text or (cls in titles and name in shared), (cls.__name__, name)
    answers = "\n".join(tables.answer_lines())
    for cls in struct_classes([route.response for route in ROUTES]):
        for name in msgspec.structs.fields(cls):
            assert f"`{name.encode_name}`" in answers


def test_every_endpoint_is_in_the_table(tables: Any) -> None:
    text = "\n".join(tables.endpoint_lines())
    for route in ROUTES:
        assert route.group in GROUPS
        assert route.peers or route.control or route in CONSOLE
        for rule in route.rules:
            assert f"`{route.method} {openapi_path(rule)}`" in text
    for table in ("api-endpoints", "api-fields", "api-answers"):
        assert f"<!-- table: {table} -->" in PAGE


def test_every_field_has_a_peer_or_is_our_own(tables: Any) -> None:
    given = [type_ for route in ROUTES for type_ in (route.request, route.query)]
    for request_type in filter(None, given):
        names = ("ChatCompletionRequest", "CompletionRequest")
        kind = request_type.__name__
        for field in msgspec.structs.fields(request_type):
            peers = tables.peers_of(names if kind in names else (kind,), field.name)
            name = f"{kind}.{field.name}"
            own = (field.name in OWN or name in OWN) and name not in THEIRS
            assert bool(peers) != own, (kind, field.name)


@pytest.mark.parametrize("status", sorted(ERROR_STATUSES))
def test_every_status_of_an_error_is_explained(status: int) -> None:
    assert f"| {status} | " in PAGE


def test_types_in_words(tables: Any) -> None:
    words = {
        f"{cls.__name__}.{field.name}": field.kind
        for cls in (GenerateRequest, NativeSampling)
        for field in tables.fields_of(cls)
    }
    assert words["GenerateRequest.text"] == "string or list of string"
    assert words["GenerateRequest.stream"] == "boolean"
    ids = "list of integer (from 0)"
    assert words["GenerateRequest.input_ids"] == f"list of (integer (from 0) or {ids})"
    link = "[NativeSampling](#nativesampling)"
    assert words["GenerateRequest.sampling_params"] == f"{link} or list of {link}"
    assert words["NativeSampling.n"] == "integer (from 1 to 128)"
    assert words["NativeSampling.top_p"] == "number (above 0 to 1)"
    assert words["NativeSampling.max_new_tokens"] == "integer (from 0)"
    assert words["NativeSampling.json_schema"] == "string or object"


@pytest.mark.parametrize(
    ("params", "request_type"),
    [
        (chat_params.CompletionCreateParamsBase, ChatCompletionRequest),
        (text_params.CompletionCreateParamsBase, CompletionRequest),
        (embedding_create_params.EmbeddingCreateParams, EmbeddingRequest),
        (response_create_params.ResponseCreateParamsBase, ResponsesRequest),
        (transcription_create_params.TranscriptionCreateParamsBase, TranscriptionForm),
        (translation_create_params.TranslationCreateParams, TranslationForm),
    ],
)
def test_whatever_the_openai_client_sends_is_known(
    params: type, request_type: type[msgspec.Struct], tables: Any
) -> None:
    sent = set(typing.get_type_hints(params))
    if request_type not in (EmbeddingRequest, TranslationForm):
        sent.add("stream")
        assert len(sent) >= (14 if request_type is TranscriptionForm else 16)
    assert sent <= {field.name for field in msgspec.structs.fields(request_type)}
    names = (request_type.__name__,)
    assert all("OpenAI" in tables.peers_of(names, name) for name in sent)


@pytest.mark.parametrize(
    ("params", "own_type"),
    [
        (response_retrieve_params.ResponseRetrieveParamsBase, ResponseQuery),
        (input_item_list_params.InputItemListParams, InputItemsQuery),
        (responses.EasyInputMessageParam, MessageItem),
        (responses.ResponseOutputMessageParam, MessageItem),
        (responses.ResponseInputTextParam, InputText),
        (responses.ResponseOutputTextParam, OutputText),
        (responses.ResponseFunctionToolCallParam, CallItem),
        (response_input_item_param.FunctionCallOutput, CallOutputItem),
        (responses.ResponseReasoningItemParam, ReasoningItem),
        (responses.FunctionToolParam, FunctionTool),
        (responses.ToolChoiceAllowedParam, AllowedFunctions),
        (responses.ResponseTextConfigParam, TextOptions),
        (responses.ResponseFormatTextJSONSchemaConfigParam, NamedSchemaFormat),
        (shared_params.Reasoning, ReasoningOptions),
    ],
)
def test_whatever_the_openai_client_sends_of_a_response_is_known(
    params: type, own_type: type[msgspec.Struct], tables: Any
) -> None:
    sent = set(typing.get_type_hints(params))
    known = {field.name for field in tables.fields_of(own_type)}
    assert sent
    assert sent <= known
    names = (own_type.__name__,)
    assert all("OpenAI" in tables.peers_of(names, name) for name in sent - {"type"})


AS_HEADERS = {"user_profile_id", "workspace_id"}
"""Arguments that the anthropic client sends as headers."""


@pytest.mark.parametrize(
    ("params", "request_type"),
    [
        (message_create_params.MessageCreateParamsBase, MessagesRequest),
        (message_count_tokens_params.MessageCountTokensParams, CountTokensRequest),
        (tool_param.ToolParam, ToolDefinition),
        (user_message_param.UserMessageParam, InputMessage),
    ],
)
def test_whatever_the_anthropic_client_sends_is_known(
    params: type, request_type: type[msgspec.Struct], tables: Any
) -> None:
    sent = set(typing.get_type_hints(params)) - AS_HEADERS
    assert sent <= {field.name for field in msgspec.structs.fields(request_type)}
    names = (request_type.__name__,)
    assert all("Anthropic" in tables.peers_of(names, name) for name in sent)


@pytest.mark.parametrize(
    ("params", "request_type"),
    [
        (ollama_types.ChatRequest, OllamaChatRequest),
        (ollama_types.GenerateRequest, OllamaGenerateRequest),
        (ollama_types.EmbedRequest, OllamaEmbedRequest),
        (ollama_types.ShowRequest, ShowRequest),
        (ollama_types.Message, OllamaMessage),
        (ollama_types.Options, OllamaOptions),
    ],
)
def test_whatever_the_ollama_client_sends_is_known(
    params: Any, request_type: type[msgspec.Struct], tables: Any
) -> None:
    sent = set(params.model_fields)
    assert sent
    assert sent <= {field.name for field in msgspec.structs.fields(request_type)}
    names = (request_type.__name__,)
    assert all("Ollama" in tables.peers_of(names, name) for name in sent)
