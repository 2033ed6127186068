"""The OpenAPI document says what the application does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from http_stub import StubEngine, app_of

from trioserve.http.openapi import openapi_path


async def document(**options: Any) -> Any:
    response = await app_of(StubEngine(), **options).test_client().get("/openapi.json")
    assert response.status_code == 200
    return json.loads(await response.get_data(True))


async def test_every_route_is_in_it() -> None:
    served = {
        (openapi_path(rule.rule), method.lower())
        for rule in app_of(StubEngine()).url_map.iter_rules()
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
    }
    described = {
        (path, method)
        for path, operations in (await document())["paths"].items()
        for method in operations
    }
    assert described == served
    assert ("/v1/chat/completions", "post") in served


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        for item in value.values():
            yield from references(item)
    elif isinstance(value, list):
        for item in value:
            yield from references(item)


async def test_every_reference_leads_somewhere() -> None:
    described = await document()
    schemas = described["components"]["schemas"]
    found = set(references(described))
    assert found
    assert {reference.rsplit("/", 1)[1] for reference in found} <= set(schemas)


async def test_it_says_what_is_not_served() -> None:
    described = await document(root_path="/llm")
    assert described["openapi"] == "3.1.0"
    assert described["servers"] == [{"url": "/llm"}]
    chat = described["components"]["schemas"]["ChatCompletionRequest"]
    assert chat["additionalProperties"] is False
    assert chat["required"] == ["messages"]
    assert chat["properties"]["length_penalty"]["enum"] == [None, 1.0]
    assert chat["properties"]["store"]["enum"] == [None, False]
    operation = described["paths"]["/v1/chat/completions"]["post"]
    assert set(operation["responses"]["200"]["content"]) == {
        "application/json",
        "text/event-stream",
    }
    assert "security" not in described["paths"]["/health"]["get"]
