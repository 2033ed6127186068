"""Kept responses of ``/v1/responses``: their content, their owners, and later requests that name
them.
"""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from openai.types.responses.response_item_list import ResponseItemList
from quart_trio.testing import TrioClient

from tests.support.chats import CALLS, HERMES, engine, said
from tests.support.http_stub import (
    StubEngine,
    StubTokenizer,
    as_engine,
    client_of,
    server_config,
    with_logprobs,
)
from tests.support.responses import RESPONSES, checked, told
from trioserve.http import create_app
from trioserve.http.api.openai.responses import endpoint
from trioserve.http.api.server_api import LocalServer


async def call(
    client: TrioClient,
    method: str,
    path: str = "",
    body: Any = None,
    *,
    key: str = "",
    status: int = 200,
) -> Any:
    """Return the decoded answer, which must have that status."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    response = await client.open(f"{RESPONSES}{path}", method=method, json=body, headers=headers)
    data = json.loads(await response.get_data(True))
    assert response.status_code == status, data
    return data


async def respond(client: TrioClient, *, key: str = "", **body: Any) -> Any:
    return checked(await call(client, "POST", "", body, key=key))


def parrot() -> StubEngine:
    """Answers with the number of messages that it was given."""
    return StubEngine(
        script=lambda call: said(f"{len(call.prompt.messages)} messages"),  # type: ignore[union-attr]
        tokenizer=StubTokenizer(HERMES),
    )


def messages_of(stub: StubEngine) -> list[tuple[str, Any]]:
    """Return the conversation of the last request."""
    prompt: Any = stub.calls[-1].prompt
    return [(message["role"], message["content"]) for message in prompt.messages]


async def test_a_conversation_that_the_server_remembers() -> None:
    stub = parrot()
    client = client_of(stub)
    first = await respond(client, input="One", instructions="Count.")
    second = await respond(client, input="Two", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    assert second["instructions"] is None
    items = [{"role": "user", "content": "Three"}, {"role": "user", "content": "Four"}]
    await respond(
        client, input=items, previous_response_id=second["id"], instructions="Mind the gap."
    )
    assert messages_of(stub) == [
        ("system", "Mind the gap."),
        ("user", "One"),
        ("assistant", "2 messages"),
        ("user", "Two"),
        ("assistant", "3 messages"),
        ("user", "Three"),
        ("user", "Four"),
    ]
    # And another way on from the first one.
    await respond(client, input="Else", previous_response_id=first["id"])
    assert messages_of(stub)[1:] == [("assistant", "2 messages"), ("user", "Else")]


async def test_tools_round_trip() -> None:
    stub = engine(CALLS)
    client = client_of(stub)
    tools = [{"type": "function", "name": name} for name in ("weather", "search")]
    first = await respond(client, input="Weather?", tools=tools)
    outputs = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": item["name"]}
        for item in first["output"]
        if item["type"] == "function_call"
    ]
    await respond(client, input=outputs, tools=tools, previous_response_id=first["id"])
    prompt: Any = stub.calls[-1].prompt
    user, assistant, *results = prompt.messages
    assert user["content"] == "Weather?"
    assert assistant["content"] == "Let me see."
    assert [each["id"] for each in assistant["tool_calls"]] == [
        result["tool_call_id"] for result in results
    ]
    assert [result["content"] for result in results] == ["weather", "search"]


async def test_a_streamed_response_is_kept_before_its_last_event() -> None:
    stub = engine("Hello")
    client = client_of(stub)
    response = await client.post(RESPONSES, json={"input": "Hi", "stream": True})
    text = await response.get_data(True)
    last = json.loads(text.rstrip().rpartition("data: ")[2])
    assert last["type"] == "response.completed"
    assert await call(client, "GET", f"/{last['response']['id']}") == last["response"]


@pytest.mark.parametrize("finish", ["stop", "length", "abort"])
async def test_what_is_kept_is_what_was_answered(finish: str) -> None:
    chunks = [with_logprobs(chunk, 1) for chunk in said("Hello", finish=finish)]  # type: ignore[arg-type]
    client = client_of(StubEngine(script=lambda _: list(chunks)))
    include = ["message.output_text.logprobs"]
    reply = await respond(client, input="Hi", metadata={"a": "b"}, include=include)
    for query in ("", "?stream=false", f"?include[]={include[0]}", f"?include={include[0]}"):
        assert await call(client, "GET", f"/{reply['id']}{query}") == reply
    assert await respond(client, input="On", previous_response_id=reply["id"])


async def test_what_is_not_kept() -> None:
    client = client_of(engine("Hello"))
    reply = await respond(client, input="Hi", store=False)
    assert reply["store"] is False
    await call(client, "GET", f"/{reply['id']}", status=404)


async def test_a_deleted_one_stays_part_of_those_that_went_on() -> None:
    stub = parrot()
    client = client_of(stub)
    first = await respond(client, input="One")
    second = await respond(client, input="Two", previous_response_id=first["id"])
    assert await call(client, "DELETE", f"/{first['id']}") == {
        "id": first["id"],
        "object": "response",
        "deleted": True,
    }
    await call(client, "GET", f"/{first['id']}", status=404)
    await call(client, "DELETE", f"/{first['id']}", status=404)
    await respond(client, input="Three", previous_response_id=second["id"])
    assert [content for _, content in messages_of(stub)] == [
        *("One", "1 messages", "Two", "3 messages", "Three"),
    ]


async def test_one_whose_predecessor_goes_while_it_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keep it with all earlier items, as if they had been its own input."""
    stub = parrot()
    client = client_of(stub)
    first = await respond(client, input="One")
    second = await respond(client, input="Two", previous_response_id=first["id"])
    kept = endpoint.ResponseEndpoints._keep

    async def after_it_is_gone(self: Any, asked: Any, reply: Any) -> None:
        for id in (second["id"], first["id"]):
            await self._service.server_api.drop_response(None, id)
        await kept(self, asked, reply)

    with monkeypatch.context() as patch:
        patch.setattr(endpoint.ResponseEndpoints, "_keep", after_it_is_gone)
        third = await respond(client, input="Three", previous_response_id=second["id"])
    await call(client, "GET", f"/{second['id']}", status=404)
    await respond(client, input="Four", previous_response_id=third["id"])
    assert [content for _, content in messages_of(stub)] == [
        *("One", "1 messages", "Two", "3 messages", "Three", "5 messages", "Four"),
    ]
    items = await call(client, "GET", f"/{third['id']}/input_items")
    assert len(items["data"]) == 1


async def test_the_oldest_are_forgotten() -> None:
    stub = as_engine(engine("Hello"))
    whole = LocalServer(stub)
    whole.responses.max_responses = 2
    client = cast(TrioClient, create_app(stub, server_config(), server_api=whole).test_client())
    ids = [(await respond(client, input="Hi"))["id"] for _ in range(3)]
    await call(client, "GET", f"/{ids[0]}", status=404)
    error = await call(
        client, "POST", "", {"input": "Hi", "previous_response_id": ids[0]}, status=400
    )
    assert error["error"] == {
        "message": f"previous_response_id: Previous response with id '{ids[0]}' not found.",
        "type": "invalid_request_error",
        "param": "previous_response_id",
        "code": "previous_response_not_found",
    }
    for id in ids[1:]:
        await call(client, "GET", f"/{id}")


class TestInputItems:
    async def test_listed(self) -> None:
        client = client_of(engine("Hello"))
        first = await respond(client, input="Zero")
        texts = [f"{number}" for number in range(25)]
        given: list[Any] = [{"role": "user", "content": text} for text in texts]
        given[24] = {"role": "assistant", "content": "24", "id": "msg_mine", "type": "message"}
        reply = await respond(client, input=given, previous_response_id=first["id"])
        path = f"/{reply['id']}/input_items"
        page = await call(client, "GET", path)
        ResponseItemList.model_validate(page)
        assert [item["content"][0]["text"] for item in page["data"]] == texts[::-1][:20]
        assert page["has_more"] is True
        assert page["first_id"] == "msg_mine"
        assert page["last_id"] == page["data"][-1]["id"]
        assert page["data"][0]["content"][0]["type"] == "output_text"
        rest = await call(client, "GET", f"{path}?after={page['last_id']}")
        assert [item["content"][0]["text"] for item in rest["data"]] == texts[::-1][20:]
        assert rest["has_more"] is False
        forward = await call(client, "GET", f"{path}?order=asc&limit=3")
        assert [item["content"][0]["text"] for item in forward["data"]] == texts[:3]
        assert len({item["id"] for item in (*page["data"], *rest["data"])}) == 25
        nothing = await call(client, "GET", f"{path}?order=asc&after=msg_mine")
        assert (nothing["data"], nothing["first_id"]) == ([], None)

    async def test_of_all_kinds(self) -> None:
        client = client_of(engine("Hello", HERMES))
        reply = await respond(
            client,
            input=[
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "x"},
                {"role": "system", "content": "Be brief."},
            ],
        )
        page = await call(client, "GET", f"/{reply['id']}/input_items?order=asc")
        prefixes = [item["id"].partition("_")[0] for item in page["data"]]
        assert prefixes == ["rs", "fc", "fco", "msg"]
        assert {item["status"] for item in page["data"]} == {"completed"}

    @pytest.mark.parametrize(
        ("query", "param"),
        [
            ("limit=0", "limit"),
            ("limit=101", "limit"),
            ("limit=x", "limit"),
            ("order=up", "order"),
            ("after=nobody", "after"),
            ("before=x", "before"),
            ("include[]=x", "include[0]"),
        ],
    )
    async def test_what_is_refused_is_named(self, query: str, param: str) -> None:
        client = client_of(engine("Hello"))
        reply = await respond(client, input="Hi")
        answer = await call(client, "GET", f"/{reply['id']}/input_items?{query}", status=400)
        assert answer["error"]["param"] == param


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("stream=true", "stream"),
        ("starting_after=5", "starting_after"),
        ("include_obfuscation=true", "include_obfuscation"),
        ("include[]=web_search_call.results", "include[0]"),
        ("limit=5", "limit"),
    ],
)
async def test_queries_that_are_not_served(query: str, param: str) -> None:
    client = client_of(engine("Hello"))
    reply = await respond(client, input="Hi")
    answer = await call(client, "GET", f"/{reply['id']}?{query}", status=400)
    assert answer["error"]["param"] == param


async def test_what_is_kept_cannot_be_cancelled() -> None:
    client = client_of(engine("Hello"))
    reply = await respond(client, input="Hi")
    answer = await call(client, "POST", f"/{reply['id']}/cancel", status=400)
    assert answer["error"]["message"].startswith("Cannot cancel a synchronous response")


async def test_unknown_ids() -> None:
    client = client_of(engine("Hello"))
    for method, path in (
        *(("GET", "/resp_x"), ("DELETE", "/resp_x")),
        *(("GET", "/resp_x/input_items"), ("POST", "/resp_x/cancel")),
    ):
        answer = await call(client, method, path, status=404)
        assert answer["error"] == {
            "message": "Response with id 'resp_x' not found.",
            "type": "invalid_request_error",
            "param": None,
            "code": "response_not_found",
        }


async def test_nobody_gets_what_is_kept_for_another_key() -> None:
    stub = parrot()
    client = client_of(stub, api_key=("one", "two"), admin_api_key=("admin",))
    reply = await respond(client, key="one", input="A secret")
    path = f"/{reply['id']}"
    for key in ("two", "admin"):
        for method, end in (
            ("GET", ""),
            ("DELETE", ""),
            ("GET", "/input_items"),
            ("POST", "/cancel"),
        ):
            await call(client, method, path + end, key=key, status=404)
        body = {"input": "Hi", "previous_response_id": reply["id"]}
        answer = await call(client, "POST", "", body, key=key, status=400)
        assert answer["error"]["code"] == "previous_response_not_found"
    # Nor does it take the other's place under the same name.
    for key, text in (("one", "mine"), ("two", "theirs")):
        await respond(client, key=key, input=text, request_id="name")
    for key, text in (("one", "mine"), ("two", "theirs")):
        items = await call(client, "GET", "/resp_name/input_items", key=key)
        assert items["data"][0]["content"][0]["text"] == text
    assert told((await call(client, "GET", path, key="one"))["output"][0])[1] == "1 messages"


async def test_the_tokens_of_an_input() -> None:
    """Count as many tokens as the response made of it has, with the one that it continues."""
    client = client_of(parrot())
    fields = {"input": "Hi there", "instructions": "Be brief.", "reasoning": {"effort": "none"}}
    counted = await call(client, "POST", "/input_tokens", fields)
    assert counted == {"object": "response.input_tokens", "input_tokens": counted["input_tokens"]}
    assert counted["input_tokens"] > 0
    response = await respond(client, **fields)
    more = {"input": [{"role": "user", "content": "So?"}], "previous_response_id": response["id"]}
    assert (await call(client, "POST", "/input_tokens", more))["input_tokens"] > 0
    fields["previous_response_id"] = response["id"]
    longer = await call(client, "POST", "/input_tokens", fields)
    assert longer["input_tokens"] > counted["input_tokens"]
    error = await call(client, "POST", "/input_tokens", {**fields, "stream": True}, status=400)
    assert error["error"]["param"] == "stream"
