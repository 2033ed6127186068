"""Every error has one shape, before a stream has begun and after."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import trio

from tests.support.http_stub import (
    Call,
    StubEngine,
    captured_logs,
    client_of,
    http_client,
    served,
    words,
)
from trioserve.http.api.errors import Unauthorized, describe_error
from trioserve.protocol.errors import (
    ContextTooLong,
    DeadlineExceeded,
    Draining,
    EngineError,
    InvalidRequest,
    QueueFull,
    RequestAborted,
    SlowReader,
    WorkerLost,
)
from trioserve.requests.stream import Chunk

TEXT = "/v1/completions"
ERRORS = [
    (
        InvalidRequest("prompt is bad", param="prompt", code="x"),
        400,
        "invalid_request_error",
        "x",
    ),
    (ContextTooLong("long"), 400, "invalid_request_error", "context_length_exceeded"),
    (QueueFull("full", retry_after=1.2), 429, "rate_limit_error", "queue_full"),
    (Draining("going"), 503, "service_unavailable_error", "draining"),
    (WorkerLost("gone"), 503, "service_unavailable_error", "no_worker"),
    (DeadlineExceeded("late"), 504, "timeout_error", "deadline_exceeded"),
    (EngineError("broken"), 500, "server_error", "engine_error"),
    (RequestAborted("stopped"), 500, "server_error", "request_aborted"),
    (SlowReader("slow"), 500, "slow_reader_error", "slow_reader"),
]


def refusing(error: Exception) -> StubEngine:
    async def admit(_: Call) -> None:
        raise error

    return StubEngine(admit=admit)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["x", ["x", "y"]])
@pytest.mark.parametrize(("error", "status", "kind", "code"), ERRORS)
async def test_before_a_stream_begins(
    error: Exception, status: int, kind: str, code: str, prompt: Any, stream: bool
) -> None:
    stub = refusing(error)
    response = await client_of(stub).post(TEXT, json={"prompt": prompt, "stream": stream})
    assert response.status_code == status
    assert response.content_type == "application/json"
    reply = json.loads(await response.get_data(True))
    assert reply["error"]["message"] == str(error)
    assert reply["error"]["type"] == kind
    assert reply["error"]["code"] == code
    assert "X-Request-Id" in response.headers
    assert all(call.left.is_set() for call in stub.calls)


@pytest.mark.parametrize("prompt", ["x", ["x", "y"]])
@pytest.mark.parametrize(("error", "status", "kind", "code"), ERRORS[5:])
async def test_after_a_stream_has_begun(
    error: Exception, status: int, kind: str, code: str, prompt: Any
) -> None:
    stub = StubEngine(script=lambda _: [Chunk("a", (97,)), error])
    with captured_logs() as logs:
        response = await client_of(stub).post(TEXT, json={"prompt": prompt, "stream": True})
        body = await response.get_data(True)
    assert response.status_code == 200
    *_, last, rest = body.split("\n\n")
    assert rest == ""
    reply = json.loads(last.removeprefix("data: "))
    assert reply["error"] == {"message": str(error), "type": kind, "param": None, "code": code}
    assert "[DONE]" not in body
    assert all(call.left.is_set() for call in stub.calls)
    assert logs[-1]["reason"] == code


async def test_a_deadline_that_ends_the_scope_is_told_in_the_stream() -> None:
    """Leave the engine's deadline, which is a scope, with the error, as the real engine does."""

    class Engine(StubEngine):
        def generate(self, prompt: Any, params: Any, **options: Any) -> Any:
            return _deadline(super().generate(prompt, params, **options))

    import contextlib

    @contextlib.asynccontextmanager
    async def _deadline(inner: Any) -> Any:
        with trio.move_on_after(0.05) as scope:
            async with inner as stream:
                yield stream
        if scope.cancelled_caught:
            raise DeadlineExceeded("the request's timeout of 0.05 s ran out")

    stub = Engine(script=lambda _: [Chunk("a", (97,)), math.inf])
    for prompt in ("x", ["x", "y"]):
        response = await client_of(stub).post(TEXT, json={"prompt": prompt, "stream": True})
        assert '"code":"deadline_exceeded"' in (await response.get_data(True))
        response = await client_of(stub).post(TEXT, json={"prompt": prompt})
        assert response.status_code == 504


@pytest.mark.parametrize(
    ("message", "param", "expected"),
    [
        ("unclosed group", "sampling_params.regex", "sampling_params.regex: unclosed group"),
        ("options.regex is too long", "options.regex", "options.regex is too long"),
        ('bad "(" (in regex)', "options.regex", 'options.regex: bad "(" (in regex)'),
        ("must be one", "n", "n: must be one"),
        ("must be text", "messages[0].content", "messages[0].content: must be text"),
        ("the body is empty", None, "the body is empty"),
    ],
)
def test_a_refusal_names_the_field(message: str, param: str | None, expected: str) -> None:
    reply = json.loads(describe_error(InvalidRequest(message, param=param)).body)
    assert reply["error"]["message"] == expected
    assert reply["error"]["param"] == param


@pytest.mark.parametrize("prompt", ["x", ["x", "y"]])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_field_that_is_refused_late_has_the_clients_name(prompt: Any, stream: bool) -> None:
    """Refuse a grammar that allows nothing after the first tokens, past the admission."""
    refused = InvalidRequest("what the request allows leaves no token to draw", param="grammar")
    stub = StubEngine(script=lambda _: [Chunk("a", (97,)), refused])
    body = {"prompt": prompt, "structured_outputs": {"regex": "a"}, "stream": stream}
    response = await client_of(stub).post(TEXT, json=body)
    *_, last = (await response.get_data(True)).strip().split("\n\n")
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["param"] == "structured_outputs.regex"
    assert error["message"] == f"structured_outputs.regex: {refused}"


async def test_hints_for_clients() -> None:
    assert describe_error(QueueFull("full", retry_after=1.2)).headers == {"Retry-After": "2"}
    assert describe_error(QueueFull("full", retry_after=0)).headers == {"Retry-After": "1"}
    assert describe_error(Unauthorized("no")).headers == {"WWW-Authenticate": "Bearer"}


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_surprise_tells_the_log_and_not_the_client(when: str) -> None:
    secret = RuntimeError("secret detail")
    if when == "before":
        stub = refusing(secret)
    else:
        stub = StubEngine(script=lambda _: [Chunk("a", (97,)), secret])
    client = client_of(stub)
    for stream in (False, True):
        with captured_logs() as logs:
            response = await client.post(TEXT, json={"prompt": "x", "stream": stream})
            text = await response.get_data(True)
        assert '"code":"internal_error"' in text
        assert "secret" not in text
        assert "Traceback" not in text
        failures = [entry for entry in logs if entry["event"] == "a request failed"]
        assert [entry["error"] for entry in failures] == [secret]


async def test_paths_and_methods() -> None:
    client = client_of(StubEngine())
    response = await client.get("/nothing")
    assert response.status_code == 404
    assert json.loads(await response.get_data(True))["error"]["code"] == "not_found"
    for method in (client.get, client.options, client.delete):
        response = await method(TEXT)
        assert response.status_code == 405
        assert response.headers["Allow"] == "POST"
        error = json.loads(await response.get_data(True))["error"]
        assert error["code"] == "method_not_allowed"


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_that_is_too_large(declared: bool) -> None:
    async def pieces() -> Any:
        for _ in range(20):
            yield b" " * 1000

    async with served(StubEngine(), max_body_size=1000) as url, http_client(url) as client:
        content = b" " * 20_000 if declared else pieces()
        response = await client.post(TEXT, content=content)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"
        assert (await client.post(TEXT, json={"prompt": "x"})).status_code == 200


async def test_health() -> None:
    stub = StubEngine()
    client = client_of(stub)
    for healthy, draining, status, word in (
        (True, False, 200, "ok"),
        (False, False, 503, "no_worker"),
        (False, True, 503, "draining"),
    ):
        stub.healthy, stub.draining = healthy, draining
        response = await client.get("/health")
        assert response.status_code == status
        assert json.loads(await response.get_data(True)) == {"status": word}


async def test_the_access_log() -> None:
    stub = StubEngine(script=lambda _: words("a b", finish="length"))
    client = client_of(stub)
    with captured_logs() as logs:
        await client.post(TEXT, json={"prompt": "xy"}, headers={"X-Request-Id": "r1"})
        response = await client.post(TEXT, json={"prompt": "xy", "stream": True})
        await response.get_data(True)
        await client.get("/nothing")
    for entry in logs:
        assert entry.pop("duration_ms") >= 0
    first, second, third = logs
    assert first == {
        "event": "request",
        "level": "INFO",
        "method": "POST",
        "path": TEXT,
        "status": 200,
        "request_id": "r1",
        "n": 1,
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "cached_tokens": 1,
        "reason": "length",
    }
    assert second.pop("request_id") != "r1"
    assert second == {name: value for name, value in first.items() if name != "request_id"}
    assert (third["status"], third["reason"]) == (404, "not_found")
    assert stub.metrics.http_responses == {
        ("POST", TEXT, 200): 2,
        ("GET", "other", 404): 1,
    }


async def test_the_metrics_of_strange_requests_stay_few() -> None:
    stub = StubEngine()
    async with served(stub, root_path="/llm") as url, http_client(url) as client:
        for number in range(3):
            await client.request(f"BREW{number}", f"/pot/{number}")
        assert (await client.get("/health")).status_code == 200
    assert stub.metrics.http_responses == {
        ("other", "other", 404): 3,
        ("GET", "/health", 200): 1,
    }


async def test_an_upgrade_to_a_websocket_is_not_taken() -> None:
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
        "Sec-WebSocket-Version": "13",
        "X-Request-Id": "mine",
    }
    with captured_logs() as logs:
        async with served(StubEngine()) as url, http_client(url) as client:
            response = await client.get(TEXT, headers=upgrade)
    assert response.status_code == 405
    assert response.headers["X-Request-Id"] == "mine"
    (entry,) = logs
    assert (entry["event"], entry["status"], entry["path"]) == ("request", 405, TEXT)
