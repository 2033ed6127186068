"""Internal errors are in the log, and never in an answer."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest

from tests.support.http_stub import StubEngine, captured_logs, http_client, served
from trioserve.http.api.dialects import error_body
from trioserve.http.api.route import Route
from trioserve.http.api.routes import ROUTES
from trioserve.http.server.error_body import ErrorDetail

SECRET = "/home/operator/secret"
ADMIN = {"Authorization": "Bearer admin"}
NEEDS_NO_ENGINE = {"welcome", "version", "tasks", "ollama_version", "console_page", "console_file"}
BODIES: dict[str, dict[str, Any]] = {
    "chat_completions": {"messages": [{"role": "user", "content": "x"}]},
    "completions": {"prompt": "x"},
    "create_response": {"input": "x"},
    "response_input_tokens": {"model": "x", "input": "x"},
    "generate": {"text": "x"},
    "messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5},
    "count_message_tokens": {"model": "x", "messages": [{"role": "user", "content": "x"}]},
    "ollama_chat": {"messages": [{"role": "user", "content": "x"}]},
    "ollama_generate": {"prompt": "x"},
    "ollama_embed": {"input": "x"},
    "ollama_embeddings": {"prompt": "x"},
    "ollama_show": {},
    "tokenize": {"prompt": "x"},
    "detokenize": {"tokens": [1]},
    "apply_template": {"model": "x", "messages": [{"role": "user", "content": "x"}]},
    "embeddings": {"input": "x"},
    "encode": {"text": "x"},
    "score": {"text_1": "x", "text_2": "y"},
    "rerank": {"query": "x", "documents": ["y"]},
    "classify": {"input": "x"},
    "open_session": {"capacity_of_str_len": 1000},
    "close_session": {"session_id": "x"},
    "abort_request": {"rid": "x"},
    "abort_requests": {"request_ids": ["x"]},
    "update_weights_from_disk": {"model_path": "x"},
    "update_weights_from_tensor": {"model_path": "x"},
    "update_weight_version": {"new_version": "x"},
    "load_adapter": {"lora_name": "x", "lora_path": "y"},
    "unload_adapter": {"lora_name": "x"},
    "transcriptions": {},
    "translations": {},
}


def test_there_is_a_body_for_each_route_that_needs_one() -> None:
    for route in ROUTES:
        needs_one = route.request is not None and not route.body_optional
        assert needs_one == (route.handler in BODIES), route.rule


class FailingEngine(StubEngine):
    """An engine with a bug in everything that a handler can ask of it."""

    armed = False

    def __getattribute__(self, name: str) -> Any:
        if name not in ("armed", "metrics", "draining") and object.__getattribute__(self, "armed"):
            raise RuntimeError(SECRET)
        return super().__getattribute__(name)


def fail() -> Any:
    raise RuntimeError(SECRET)


@pytest.mark.parametrize("streams", [False, True])
async def test_no_route_tells_a_client_what_went_wrong(
    streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = FailingEngine()
    monkeypatch.setattr(stub.metrics, "render", fail)
    with captured_logs() as logs:
        async with served(stub, admin_api_key=("admin",)) as url:
            stub.armed = True
            async with http_client(url, headers=ADMIN) as client:
                for route in ROUTES:
                    for rule in route.rules:
                        logs.clear()
                        response = await _ask(client, route, rule, streams)
                        _check(route, response, logs)
            stub.armed = False


async def _ask(client: httpx.AsyncClient, route: Route, rule: str, streams: bool) -> Any:
    body = BODIES.get(route.handler)
    if body is not None and route.events is not None:
        body = {**body, "stream": streams}
    path = rule.replace("<path:name>", "index.html" if "console" in rule else "x")
    path = path.replace("<index>", "0")
    if route.is_form:
        return await client.request(route.method, path, data=body, files={"file": b"x"})
    return await client.request(route.method, path, json=body)


def _check(route: Route, response: httpx.Response, logs: list[dict[str, Any]]) -> None:
    assert SECRET not in response.text + str(response.headers)
    assert "Traceback" not in response.text
    if route.handler in NEEDS_NO_ENGINE:
        assert response.status_code == 200
        return
    if "<response_id>" in route.rule:
        assert response.status_code == 404
        return
    if route.handler in ("models", "model"):
        assert response.status_code in (200, 404, 500)
        return
    assert response.status_code == 500, response.text
    detail = ErrorDetail(
        message="the server failed on this request", type="server_error", code="internal_error"
    )
    expected = error_body(route.rule).of(500, detail)
    assert json.loads(response.text) == msgspec.to_builtins(expected)
    assert [entry["event"] for entry in logs if "error" in entry] == ["a request failed"]
