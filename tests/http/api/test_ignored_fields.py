"""Fields that are ignored where the server is told so: ``--ignore-unknown-fields``."""

from __future__ import annotations

import logging

import msgspec
import pytest

from tests.support.http_stub import StubEngine, http_client, served
from trioserve.http.api.openai.chat.schemas import ChatCompletionRequest
from trioserve.http.api.openai.completions.schemas import CompletionRequest
from trioserve.http.api.schema.ignored_fields import MAX_IGNORED, IgnoredFields, without_field
from trioserve.http.api.schema.reading import parse_body
from trioserve.protocol.errors import InvalidRequest

MESSAGES = [
    {"role": "user", "content": "hi", "cache_control": {"type": "ephemeral"}},
    {"role": "user", "content": "there", "cache_control": {"type": "ephemeral"}},
]
BODY = {
    "messages": MESSAGES,
    "max_tokens": 5.0,
    "x_new": [1, 2],
    "verbosity": "low",
    "stream_options": {"include_usage": True, "x_inner": 1},
    "stream": True,
}


def test_they_are_left_out_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    ignored = IgnoredFields()
    body = msgspec.json.encode(BODY)
    with pytest.raises(InvalidRequest):
        parse_body(ChatCompletionRequest, body)
    with caplog.at_level(logging.WARNING, "trioserve"):
        for _ in range(2):
            request = parse_body(ChatCompletionRequest, body, ignored)
            assert request.max_tokens == 5
            assert [message.content for message in request.messages] == ["hi", "there"]
            assert request.stream_options is not None
            assert request.stream_options.include_usage
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == 4
    for name in ("x_new", "verbosity", "stream_options.x_inner", "messages[].cache_control"):
        assert sum(f"field='{name}'" in line for line in logged) == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"prompt": "x", "y": 1, "max_tokens": "many"}', "max_tokens"),
        (b'{"prompt": "x", "y": 1, "max_tokens": -1}', "max_tokens"),
        (b'{"prompt": "x", "y": 1, "n": 0}', "n"),
    ],
)
def test_wrong_values_are_refused_nevertheless(body: bytes, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_body(CompletionRequest, body, IgnoredFields())
    assert caught.value.param == param


def test_there_is_an_end_to_it(caplog: pytest.LogCaptureFixture) -> None:
    def body(count: int, start: int = 0) -> bytes:
        fields = {f"x{number}": 1 for number in range(start, start + count)}
        return msgspec.json.encode({"prompt": "x", **fields})

    ignored = IgnoredFields()
    parse_body(CompletionRequest, body(MAX_IGNORED), ignored)
    with pytest.raises(InvalidRequest, match="is not a field"):
        parse_body(CompletionRequest, body(MAX_IGNORED + 1), ignored)
    large = msgspec.json.encode({"prompt": "x" * (1 << 20), "y": 1})
    with pytest.raises(InvalidRequest, match="y is not a field"):
        parse_body(CompletionRequest, large, ignored)
    with caplog.at_level(logging.WARNING, "trioserve"):
        for start in range(0, 40 * MAX_IGNORED, MAX_IGNORED):
            parse_body(CompletionRequest, body(MAX_IGNORED, start), ignored)
    assert len(caplog.records) <= 256


def test_a_field_is_taken_out_by_its_path() -> None:
    value = {"a": [{"b": 1, "c": 2}, {"b": 3}, 4], "d": {"e": 5}}
    assert without_field(value, "a[0].b")
    assert without_field(value, "d.e")
    assert value == {"a": [{"c": 2}, {}, 4], "d": {}}
    for param in ("x", "a[0].x", "a[0]", "", "d..e", "a.b"):
        assert not without_field(value, param)


async def test_a_server_is_strict_unless_it_is_told_otherwise() -> None:
    body = {"prompt": "hi", "x_new": 1}
    for lenient, status in ((False, 400), (True, 200)):
        options = {"ignore_unknown_fields": lenient}
        async with served(StubEngine(), **options) as url, http_client(url) as client:
            assert (await client.post("/v1/completions", json=body)).status_code == status
