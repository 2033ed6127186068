"""The OpenAPI document says what the application does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tests.support.http_stub import StubEngine, app_of, client_of
from trioserve.http.api.openapi import build_document, error_statuses, openapi_path
from trioserve.http.api.route import Route
from trioserve.http.api.routes import ROUTES
from trioserve.http.api.schema.reading import Exclusive, struct_classes


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
    assert chat["properties"]["store"]["enum"] == [None, False]
    assert "Excludes `" in chat["properties"]["custom_params"]["description"]
    operation = described["paths"]["/v1/chat/completions"]["post"]
    assert set(operation["responses"]["200"]["content"]) == {
        "application/json",
        "text/event-stream",
    }
    assert "security" not in described["paths"]["/health"]["get"]


async def test_every_path_that_wants_a_key_says_so() -> None:
    client = client_of(StubEngine(), api_key=("key",), admin_api_key=("other",))
    response = await client.get("/openapi.json", headers={"Authorization": "Bearer key"})
    described = json.loads(await response.get_data(True))
    assert len(described["paths"]) > 20
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            named = re.sub(r"{\w+}", "x", path)
            response = await client.open(named, method=method.upper())
            refused = response.status_code == 401
            assert refused == ("security" in operation) == ("401" in operation["responses"])


async def test_the_largest_token_id_is_that_of_the_model() -> None:
    schemas = (await document())["components"]["schemas"]
    for kind, field in (("NativeSampling", "stop_token_ids"), ("CompletionRequest", "prompt")):
        text = json.dumps(schemas[kind]["properties"][field])
        assert '"format": "token-id"' in text
        assert '"maximum": 1114111' in text
        assert '"maximum": 2147483647' not in text


async def test_every_operation_has_a_name_of_its_own() -> None:
    described = await document()
    names = [
        operation["operationId"]
        for operations in described["paths"].values()
        for operation in operations.values()
    ]
    assert len(set(names)) == len(names)
    assert {"tokenize", "post_v1_tokenize", "health", "get_ping", "post_ping"} <= set(names)


@pytest.mark.parametrize(
    ("path", "statuses"),
    [
        ("/generate", [400, 401, 404, 408, 413, 415, 429, 500, 503, 504]),
        ("/v1/completions", [400, 401, 404, 408, 413, 415, 429, 500, 503, 504]),
        ("/tokenize", [400, 401, 404, 408, 413, 415, 429, 500]),
        ("/v1/models/<path:name>", [401, 404, 429, 500]),
        ("/v1/responses", [400, 401, 404, 408, 413, 415, 429, 500, 503, 504]),
        ("/v1/responses/<response_id>/cancel", [400, 401, 404, 429, 500]),
        ("/health", [500]),
    ],
)
def test_statuses(path: str, statuses: list[int]) -> None:
    (route,) = [route for route in ROUTES if path == route.rule]
    assert error_statuses(route, path) == statuses


class Part(msgspec.Struct):
    """Held by another."""

    EXCLUSIVE = (Exclusive(("a", "b"), required=True), Exclusive(("c", "d")))

    a: int | None = None
    b: int | None = None
    c: int | None = None
    d: int | None = None


class Whole(msgspec.Struct):
    """Holds others."""

    EXCLUSIVE = (Exclusive(("x", "y", "z")),)

    parts: list[Part] | None = None
    x: int | None = None
    y: int | None = None
    z: int | None = None


def test_what_excludes_each_other() -> None:
    import jsonschema

    assert struct_classes([list[Whole]]) == [Whole, Part]
    route = Route(
        method="POST", rule="/x", handler="x", summary="", group="", request=Whole, response=Whole
    )
    described = build_document([route])
    schema = {**described, "$ref": "#/components/schemas/Whole"}
    for value, fits in (
        ({}, True),
        ({"x": 1}, True),
        ({"y": 1, "x": None}, True),
        ({"x": 1, "z": 2}, False),
        ({"parts": [{"a": 1}, {"b": 2, "a": None}]}, True),
        ({"parts": [{}]}, False),
        ({"parts": [{"a": 1, "b": 2}]}, False),
        ({"parts": [{"a": None}]}, False),
        ({"parts": [{"a": 1, "c": 1, "d": 2}]}, True),  # Told in words alone.
    ):
        assert jsonschema.Draft202012Validator(schema).is_valid(value) == fits, value
    text = described["components"]["schemas"]["Part"]["properties"]["d"]["description"]
    assert text == "Excludes `c`."
