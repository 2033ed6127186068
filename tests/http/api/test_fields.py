"""Use of all fields of requests: each is read, refused by name or documented as a hint."""

from __future__ import annotations

import typing
from typing import Any

import msgspec
import pytest

from tests.support.http_stub import StubEngine, StubTokenizer, client_of
from trioserve.http.api.openai.chat.schemas import ChatCompletionRequest
from trioserve.http.api.openai.completions.schemas import CompletionRequest
from trioserve.http.api.schema.reading import hint, parse_body

TEMPLATE = "{{ tools }}{{ messages }}<tool_call>"
TOOL = {"type": "function", "function": {"name": "search"}}


class Recorder:
    """A request that records which of its fields are read."""

    def __init__(self, request: Any, seen: set[str]) -> None:
        self._request = request
        self._seen = seen

    def __getattr__(self, name: str) -> Any:
        self._seen.add(name)
        return getattr(self._request, name)


def served(request_type: type[msgspec.Struct]) -> set[str]:
    """Return the fields that aren't documented as refused, or as without influence."""
    names = set()
    hints = typing.get_type_hints(request_type, include_extras=True)
    for name in request_type.__struct_fields__:
        metas = [
            meta
            for meta in getattr(hints[name], "__metadata__", ())
            if isinstance(meta, msgspec.Meta)
        ]
        refused = any(meta.extra and "only" in meta.extra for meta in metas)
        if not refused and hint() not in metas:
            names.add(name)
    return names


@pytest.mark.parametrize(
    ("path", "request_type", "body", "others"),
    [
        ("/v1/completions", CompletionRequest, {"prompt": "x"}, [{"logprobs": 1}]),
        (
            "/v1/chat/completions",
            ChatCompletionRequest,
            {"messages": [{"role": "user", "content": "x"}]},
            [{"logprobs": True}, {"tools": [TOOL]}],
        ),
    ],
)
async def test_every_field_that_is_served_is_looked_at(
    path: str,
    request_type: type[msgspec.Struct],
    body: dict[str, Any],
    others: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: set[str] = set()
    monkeypatch.setattr(
        "trioserve.http.api.service.parse_body",
        lambda wanted, data, _: Recorder(parse_body(wanted, data), seen),
    )
    client = client_of(StubEngine(tokenizer=StubTokenizer(TEMPLATE)))
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    for extra in ({}, streamed, *others):
        response = await client.post(path, json={**body, **extra})
        assert response.status_code == 200, await response.get_data(True)
    assert served(request_type) - seen == set()
    assert "temperature" in seen


@pytest.mark.parametrize("request_type", [CompletionRequest, ChatCompletionRequest])
def test_every_field_is_described(request_type: type[msgspec.Struct]) -> None:
    (schema,) = msgspec.json.schema_components([request_type], ref_template="{name}")[1:]
    described = schema[request_type.__name__]["properties"]
    assert [name for name, field in described.items() if not field.get("description")] == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
    ],
)
async def test_an_empty_salt_is_refused(path: str, body: dict[str, Any]) -> None:
    stub = StubEngine(tokenizer=StubTokenizer(TEMPLATE))
    response = await client_of(stub).post(path, json=body | {"cache_salt": ""})
    assert response.status_code == 400
    assert (await response.get_json())["error"]["param"] == "cache_salt"
    assert not stub.calls
