"""Beam search over HTTP: its fields at each endpoint, and the scores in the answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.http_stub import Call, Step, StubEngine, StubTokenizer, client_of
from trioserve.requests.stream import Chunk

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/generate": {"text": "x"},
}


def beams(call: Call) -> list[Step]:
    """Return all outputs at the end, as a beam search does."""
    return [
        Chunk(f"beam {index}", tuple(b"beam 0"), index, None, "stop", None, -1.5 - index)
        for index in range(call.params.n)
    ]


def stub_of() -> StubEngine:
    return StubEngine(script=beams, tokenizer=StubTokenizer("{{ messages[0].content }}"))


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    if path == "/generate":
        top = {name: fields.pop(name) for name in ("stream",) if name in fields}
        return {**BODIES[path], **top, "sampling_params": fields}
    return {**BODIES[path], **fields}


async def post(stub: StubEngine, path: str, **fields: Any) -> Any:
    response = await client_of(stub).post(path, json=body_of(path, **fields))
    return response.status_code, json.loads(await response.get_data(True))


def scores_of(reply: Any) -> list[float]:
    if isinstance(reply, dict) and "choices" in reply:
        return [choice["cumulative_logprob"] for choice in reply["choices"]]
    replies = reply if isinstance(reply, list) else [reply]
    return [each["meta_info"]["cumulative_logprob"] for each in replies]


@pytest.mark.parametrize("path", list(BODIES))
async def test_fields_reach_the_engine_and_scores_come_back(path: str) -> None:
    stub = stub_of()
    status, reply = await post(
        stub,
        path,
        use_beam_search=True,
        n=2,
        beam_width=5,
        length_penalty=0.5,
        early_stopping="never",
    )
    assert status == 200, reply
    assert scores_of(reply) == [-1.5, -2.5]
    params = stub.calls[0].params
    assert (params.n, params.beam_width) == (2, 5)
    assert (params.length_penalty, params.early_stopping) == (0.5, "never")


@pytest.mark.parametrize("path", list(BODIES))
async def test_the_width_is_the_number_of_outputs_by_default(path: str) -> None:
    stub = stub_of()
    await post(stub, path, use_beam_search=True, n=3)
    await post(stub, path, use_beam_search=True)
    await post(stub, path, use_beam_search=False, n=3, length_penalty=1.0, early_stopping=False)
    widths = [(call.params.n, call.params.beam_width) for call in stub.calls]
    assert widths == [(3, 3), (1, 1), (3, 0)]


async def test_best_of_is_the_width_of_a_completion() -> None:
    stub = stub_of()
    _, reply = await post(stub, "/v1/completions", use_beam_search=True, n=2, best_of=4)
    assert [choice["text"] for choice in reply["choices"]] == ["beam 0", "beam 1"]
    params = stub.calls[0].params
    assert (params.n, params.beam_width, params.logprobs) == (2, 4, None)


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize("field", ["beam_width", "length_penalty", "early_stopping"])
async def test_its_fields_need_beam_search(path: str, field: str) -> None:
    value = {"beam_width": 2, "length_penalty": 2.0, "early_stopping": True}[field]
    status, reply = await post(stub_of(), path, **{field: value})
    assert status == 400
    assert f"{field} needs use_beam_search to be true" in json.dumps(reply)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"n": 4, "beam_width": 2}, "n must be at most beam_width (2), got 4"),
        ({"n": 40}, "n must be at most 32 with use_beam_search, got 40"),
        ({"n": 2, "best_of": 40}, "best_of must be at most 32 with use_beam_search, got 40"),
    ],
)
async def test_errors_name_the_field_that_was_given(fields: dict[str, Any], name: str) -> None:
    status, reply = await post(stub_of(), "/v1/completions", use_beam_search=True, **fields)
    assert status == 400
    assert name in reply["error"]["message"]


async def stream(path: str, **fields: Any) -> AsyncIterator[Any]:
    response = await client_of(stub_of()).post(path, json=body_of(path, stream=True, **fields))
    assert response.status_code == 200
    for line in (await response.get_data(True)).splitlines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


@pytest.mark.parametrize("path", list(BODIES))
async def test_streamed_scores_come_with_the_last_event(path: str) -> None:
    found: list[float] = []
    async for event in stream(path, use_beam_search=True, n=2):
        if path == "/generate":
            found += scores_of(event)
        else:
            for choice in event["choices"]:
                assert ("cumulative_logprob" in choice) == (choice["finish_reason"] is not None)
                found += [choice["cumulative_logprob"]] if choice["finish_reason"] else []
    assert found == [-1.5, -2.5]
