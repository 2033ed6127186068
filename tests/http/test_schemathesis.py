"""Requests made out of ``/openapi.json`` by schemathesis: what it says is what happens.

The same requests every time: the examples are derived from the code, not from chance.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import hypothesis
import msgspec
import pytest
import schemathesis
import trio
from hypothesis import HealthCheck, Phase
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from tests.support.fake_transcriber import FakeTranscriber
from tests.support.http_stub import http_client, server_config
from trioserve import Engine
from trioserve.http import create_app
from trioserve.http.api.auth import OPEN_PATHS
from trioserve.http.api.openapi import build_document, openapi_path
from trioserve.http.api.routes import ROUTES
from trioserve.http.api.schema.reading import parse_body
from trioserve.http.server.server import serve_app
from trioserve.protocol.errors import InvalidRequest
from trioserve.testing.fake_encoder import fake_encoder_config
from trioserve.testing.fake_engine import open_fake_encoder, open_fake_engine

OPERATIONS = [(openapi_path(rule), route.method) for route in ROUTES for rule in route.rules]
ENDLESS = {("/console/live", "GET"), ("/kv_cache_events", "GET")}
"""Operations that answer until the client leaves."""
OPEN = set(map(openapi_path, OPEN_PATHS))
WITH_BODY = [(route.rule, route.method) for route in ROUTES if route.request is not None]
RANGE = re.compile(r"must be (?!at most max_|left out where|.*--max).*, got ", re.DOTALL)
"""Pattern of the errors of a value out of its range, if the range depends on nothing else."""
FORMS = {route.request for route in ROUTES if route.is_form}
FORM_PATHS = {openapi_path(rule) for route in ROUTES if route.is_form for rule in route.rules}
UNGUESSABLE = {
    "/workers/{index}": 400,
    "/v1/models/{name}": 404,
    "/update_weights_from_disk": 400,
    "/update_weights_from_tensor": 400,
    "/close_session": 400,
    "/console/static/{name}": 404,
    "/v1/responses/{response_id}": 404,
    "/v1/responses/{response_id}/input_items": 404,
    "/v1/responses/{response_id}/cancel": 404,
    **dict.fromkeys(("/load_lora_adapter", "/v1/load_lora_adapter"), 400),
    **dict.fromkeys(("/unload_lora_adapter", "/v1/unload_lora_adapter"), 404),
}
"""Paths with names that no schema can give, and their status."""
OTHER_PARTS = {"EmbedsPart", "ImageInput", "ImageUrlPart", "InputImage"}
"""Classes of parts that aren't text."""
MAX_FIELDS = 120
ADMIN = {"Authorization": "Bearer the-admin-key"}
SETTINGS = hypothesis.settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)


def operation(path: str, method: str, mode: GenerationMode) -> Any:
    """Return an operation of the description, as schemathesis sees it."""
    document = build_document(ROUTES, vocab_size=256)
    asked = document["paths"][path][method.lower()]
    asked.pop("security", None)  # Every request brings the key,
    if "requestBody" in asked:
        asked["requestBody"]["required"] = True  # and where there may be a body, there is one.
    if mode is GenerationMode.POSITIVE:
        lower_bounds(document)
        drop_nulls(document)
        ask_for_texts(document)
    return schemathesis.openapi.from_dict(document)[path][method]


def lower_bounds(value: Any) -> None:
    """Let numbers be below 200, so that more of the requests fit the model and are computed."""
    if isinstance(value, dict):
        if value.get("maximum") == 2**31 - 1:
            value["maximum"] = 199
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            lower_bounds(item)


def drop_nulls(document: dict[str, Any]) -> None:
    """Drop fields that may be null alone from large classes: 125 are too many for schemathesis."""
    for component in document["components"]["schemas"].values():
        fields = component.get("properties", {})
        if len(fields) > MAX_FIELDS:
            kept = {name: field for name, field in fields.items() if field.get("enum") != [None]}
            component["properties"] = kept


def ask_for_texts(document: dict[str, Any]) -> None:
    """Leave images and embeddings out: the model reads none, and no schema tells base64 of them."""
    completion = document["components"]["schemas"]["CompletionRequest"]
    del completion["properties"]["prompt_embeds"]
    prompt = completion["properties"]["prompt"]
    prompt["anyOf"] = [each for each in prompt["anyOf"] if each != {"type": "null"}]
    completion["required"] = [*completion.get("required", ()), "prompt"]
    drop_parts(document["components"]["schemas"])


def drop_parts(value: Any) -> None:
    """Drop parts that aren't text wherever there is a choice of parts."""
    if isinstance(value, dict):
        for choice in ("anyOf", "oneOf"):
            if choice in value:
                value[choice] = [each for each in value[choice] if not is_other_part(each)]
        mapping = value.get("discriminator", {}).get("mapping", {})
        for tag in [tag for tag, place in mapping.items() if is_other_part({"$ref": place})]:
            del mapping[tag]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            drop_parts(item)


def is_other_part(schema: dict[str, Any]) -> bool:
    return schema.get("$ref", "").rpartition("/")[2] in OTHER_PARTS


def is_fair(response: Any, request_type: type[msgspec.Struct] | None) -> bool:
    """Return whether a valid request's answer is a success, or a refusal for a good reason.

    Good reasons lie in several fields together, or in the model, so no schema can contain them.
    Such an error names a field, and comes after the body has been decoded by the schema.
    """
    if response.status_code == 504:
        return b'"timeout"' in response.request.body
    if response.status_code != 400:
        return response.status_code in (200, 404)
    error = response.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    if request_type is None:  # the path has the field
        return isinstance(error, dict) and error["param"] == "index"
    try:
        if request_type not in FORMS:
            parse_body(request_type, response.request.body)
    except InvalidRequest as refusal:
        return str(refusal).startswith("give at most one of")
    known = {field.name for field in msgspec.structs.fields(request_type)}
    # Some forms of errors have a place for the field, others name it in what they say.
    said = [re.split(r"[.\[]", error["param"])[0]] if "param" in error else words_of(message)
    return not known.isdisjoint(said) and RANGE.search(message) is None


def words_of(message: str) -> list[str]:
    """Return the words in an error that may be names of fields."""
    return re.findall(r"\w+", message)


def check(url: str, path: str, method: str, mode: GenerationMode) -> Counter[int]:
    """Count the statuses of the answers to requests of ``mode``; each has to be as described."""
    statuses: Counter[int] = Counter()
    request_type = next(
        route.request
        for route in ROUTES
        if path in map(openapi_path, route.rules) and route.method == method
    )

    @SETTINGS
    @hypothesis.given(case=operation(path, method, mode).as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        response = case.call(base_url=url, headers=ADMIN)
        statuses[response.status_code] += 1
        excluded = [positive_data_acceptance]  # For is_fair, which knows the reasons.
        if response.status_code == 504:
            excluded.append(not_a_server_error)
        case.validate_response(response, excluded_checks=excluded)
        if mode is GenerationMode.POSITIVE:
            assert is_fair(response, request_type), response.text

    @SETTINGS
    @hypothesis.given(case=operation(path, method, mode).as_strategy(generation_mode=mode))
    def run_form(case: Any) -> None:
        """Take a wrong form: it has texts alone, so a list in place of a text is another text."""
        response = case.call(base_url=url, headers=ADMIN)
        statuses[response.status_code] += 1
        case.validate_response(response, excluded_checks=[negative_data_rejection])

    is_wrong_form = request_type in FORMS and mode is GenerationMode.NEGATIVE
    (run_form if is_wrong_form else run)()
    return statuses


async def run_against_a_server(path: str, method: str, mode: GenerationMode) -> Counter[int]:
    async with server(path) as url:
        statuses: Counter[int] = await trio.to_thread.run_sync(check, url, path, method, mode)
    return statuses


@pytest.mark.parametrize(("path", "method"), [each for each in OPERATIONS if each not in ENDLESS])
async def test_requests_that_fit_the_description(path: str, method: str) -> None:
    statuses = await run_against_a_server(path, method, GenerationMode.POSITIVE)
    if path in UNGUESSABLE:
        assert set(statuses) == {UNGUESSABLE[path]}
    else:
        # Of pairs of texts, most of what a schema can tell doesn't go together. Of few fields, one
        # that the model decides on is in most requests, and most of a transcript's go with some
        # formats only.
        few = ("/api/embed", "/v1/audio/transcriptions")
        enough = 0 if "score" in path else 1 if path in few else 3
        assert statuses[200] >= min(enough, statuses.total())


@pytest.mark.parametrize(("path", "method"), WITH_BODY)
async def test_requests_that_do_not_fit(path: str, method: str) -> None:
    statuses = await run_against_a_server(path, method, GenerationMode.NEGATIVE)
    assert set(statuses) <= ({200, 400, 415} if path in FORM_PATHS else {400, 415})
    assert statuses[400] or path not in FORM_PATHS
    assert statuses.total() >= 8


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer another-key"},
        {"Authorization": "Basic dGhlLWtleTo="},
        {"Authorization": "Bearer \xe9" + "x" * 9000},
    ],
    ids=["none", "another", "basic", "long"],
)
async def test_requests_without_a_key(headers: dict[str, str]) -> None:
    async with server() as url, http_client(url) as client:
        for path, method in OPERATIONS:
            raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
            response = await client.request(method, path, headers=raw, content=b"{}")
            expected = UNGUESSABLE.get(path, 200) if path in OPEN else 401
            assert response.status_code == expected, path
            if expected == 401:
                assert response.headers["WWW-Authenticate"] == "Bearer"


async def test_routes_of_control_want_an_admins_key() -> None:
    async with server() as url, http_client(url) as client:
        for route in ROUTES:
            if route.control:
                needs_body = route.request is not None and not route.body_optional
                for key, status in (
                    ("the-key", 401),
                    ("the-admin-key", 400 if needs_body else 200),
                ):
                    # One of them answers until it is left.
                    async with client.stream(
                        route.method,
                        route.rule.replace("<index>", "0"),
                        headers={"Authorization": f"Bearer {key}"},
                    ) as response:
                        assert response.status_code == status, route.rule


OTHER_RULES = {
    ("GET", "/v1/responses/input_tokens"),
    ("DELETE", "/v1/responses/input_tokens"),
}
"""Methods of the rule ``/v1/responses/{id}``, for which the end of the path is an id."""


async def test_methods_that_a_path_does_not_have() -> None:
    methods: dict[str, set[str]] = {}
    for path, method in OPERATIONS:
        methods.setdefault(path, set()).add(method)
    async with server() as url, http_client(url, headers=ADMIN) as client:
        for path, known in methods.items():
            for method in {"GET", "POST", "PUT", "DELETE", "PATCH", "TRACE", "QUERY"} - known:
                response = await client.request(method, path, content=b"{}")
                if (method, path) in OTHER_RULES:
                    assert response.status_code == 404, (method, path)
                    continue
                assert response.status_code == 405, (method, path)
                assert known <= set(re.findall(r"\w+", response.headers["Allow"]))


HEADERS: list[tuple[str, str]] = [
    *(("Content-Type", value) for value in ("", ";", "application/json; charset=\xe9", "a" * 9000)),
    *(("Content-Encoding", value) for value in ("gzip", "identity, gzip", "", "\xe9")),
    *(("X-Request-Id", value) for value in ("", "\xe9", "a" * 9000, "a b", "{{ 7 * 7 }}")),
    *(("traceparent", value) for value in ("", "00", "00-" + "0" * 32 + "-" + "0" * 16 + "-00")),
    *(("tracestate", value) for value in ("\xe9", "a=" + "b" * 9000)),
    *(("Accept", value) for value in ("text/plain", "\xe9", ";;;")),
    *(("Range", value) for value in ("bytes=0-", "bytes=9999999999999999999-1")),
    *(("Cookie", value) for value in ("\xe9=\xe9", "a" * 9000)),
    *(("Origin", value) for value in ("null", "\xe9", "https://example.org")),
    *(("X-Forwarded-For", value) for value in ("\xe9", "127.0.0.1," * 500)),
    *(("Host", value) for value in ("\xe9", "a" * 9000, "127.0.0.1:99999", "[::1")),
    *(("If-None-Match", value) for value in ("*", '"', "\xe9")),
]


@pytest.mark.parametrize(("path", "method"), [("/v1/completions", "POST"), ("/v1/models", "GET")])
async def test_headers_of_all_kinds(path: str, method: str) -> None:
    body = b'{"prompt": "x", "max_tokens": 1}' if method == "POST" else b""
    async with server() as url, http_client(url) as client:
        for name, value in HEADERS:
            raw = {b"Authorization": b"Bearer the-key", b"Content-Type": b"application/json"}
            raw[name.encode()] = value.encode("latin-1")
            response = await client.request(method, path, headers=[*raw.items()], content=body)
            assert response.status_code in (200, 400, 415), (name, value, response.text)
            assert response.text
            assert "Traceback" not in response.text
            response = await client.get("/health")
            assert response.status_code == 200


@pytest.mark.parametrize("target", [b"/v1/models?%ff=%00", b"/v1/models/%ff%00"])
async def test_targets_that_are_no_text(target: bytes) -> None:
    async with server() as url, http_client(url, headers=ADMIN) as client:
        response = await client.get(client.base_url.copy_with(raw_path=target))
        assert response.status_code in (200, 400, 404), response.text
        assert response.text


def engine_for(path: str) -> contextlib.AbstractAsyncContextManager[Engine]:
    """Return an engine with a model for ``path``."""
    if path in ("/v1/embeddings", "/encode", "/api/embed"):
        return open_fake_encoder()
    if "score" in path or "rerank" in path:
        shape = fake_encoder_config("classify", labels=("relevant",))
        return open_fake_encoder(encoder_config=shape)
    if "classify" in path:
        return open_fake_encoder("classify")
    return open_fake_engine(max_model_len=1000)


@contextlib.asynccontextmanager
async def server(path: str = "/") -> AsyncIterator[str]:
    """Run a server with both kinds of keys; yield its URL."""
    config = server_config(api_key=["the-key"], admin_api_key=["the-admin-key"])
    async with engine_for(path) as engine, trio.open_nursery() as nursery:
        if "audio" in path:
            engine.transcriber = FakeTranscriber()  # type: ignore[assignment]
        (url,) = await nursery.start(serve_app, create_app(engine, config), config)
        yield url
        nursery.cancel_scope.cancel()
