"""Responses for the tests: asked of a server, and held to what the openai package says of them."""

from __future__ import annotations

import json
from typing import Any

import pydantic
from openai.types.responses import Response, ResponseStreamEvent

from tests.support.http_stub import StubEngine, client_of, http_client, served

RESPONSES = "/v1/responses"

_EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)


def checked(reply: Any) -> Any:
    """Return a response that the openai package accepts."""
    Response.model_validate(reply, strict=True)
    return reply


def checked_events(text: str) -> list[Any]:
    """Return a stream's events, with names and order as the openai package has them."""
    *parts, rest = text.split("\n\n")
    assert rest == ""
    events = []
    sent = [part for part in parts if not part.startswith(":")]  # without keep-alive comments
    for number, part in enumerate(sent):
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        _EVENT.validate_python(event)
        events.append(event)
    return events


async def respond(stub: StubEngine, **body: Any) -> Any:
    """Return the response to a request that must succeed."""
    response = await client_of(stub).post(RESPONSES, json=body)
    assert response.status_code == 200, await response.get_data(True)
    return checked(json.loads(await response.get_data(True)))


async def stream(stub: StubEngine, **body: Any) -> list[Any]:
    """Return the events of a response by a real server; the test client can't hold many."""
    async with served(stub) as url, http_client(url) as client:
        response = await client.post(RESPONSES, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream"
    return checked_events(response.text)


async def refused(stub: StubEngine, *, status: int = 400, **body: Any) -> Any:
    """Return the error of a request that must fail."""
    response = await client_of(stub).post(RESPONSES, json={"input": "Hi", **body})
    assert response.status_code == status, await response.get_data(True)
    return json.loads(await response.get_data(True))["error"]


def told(item: Any) -> Any:
    """Return an item without its ids."""
    if item["type"] == "function_call":
        return "call", item["name"], item["arguments"], item["status"]
    (part,) = item["content"]
    return item["type"], part["text"], item["status"]


def accumulated(events: list[Any]) -> list[Any]:
    """Return the items accumulated from a stream's deltas, in the form of :func:`told`."""
    texts: dict[int, str] = {}
    items: list[Any] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            assert event["item"]["status"] == "in_progress"
            texts[event["output_index"]] = ""
        elif kind.endswith(".delta"):
            texts[event["output_index"]] += event["delta"]
        elif kind == "output_item.done":
            said = told(event["item"])
            assert texts[event["output_index"]] == said[2 if said[0] == "call" else 1]
            items.append(said)
    return items
