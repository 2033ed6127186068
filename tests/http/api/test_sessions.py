"""Sessions over HTTP, as SGLang has them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
import trio
from quart_trio.testing import TrioClient

from tests.support.http_stub import server_config
from trioserve.engine.engine import Engine
from trioserve.http import create_app
from trioserve.http.api.control.schemas import Done
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import open_fake_engine

SAMPLING = {"max_new_tokens": 5, "sampling_seed": 1}


@contextlib.asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[tuple[Engine, TrioClient]]:
    async with open_fake_engine(lambda: FakeWorker(step_time=0.002, page_size=4)) as engine:
        yield engine, create_app(engine, server_config(**options)).test_client()


async def post(
    client: TrioClient, path: str, body: Any, *, key: str = "", status: int = 200
) -> Any:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    response = await client.post(path, json=body, headers=headers)
    data = json.loads(await response.get_data(True))
    assert response.status_code == status, data
    return data


async def opened(client: TrioClient, **fields: Any) -> str:
    id: str = await post(client, "/open_session", {"capacity_of_str_len": 1000, **fields})
    return id


async def turn(client: TrioClient, text: str, status: int = 200, **params: Any) -> Any:
    body = {
        "text": text,
        "sampling_params": SAMPLING,
        "session_params": params,
        "return_prompt_token_ids": True,
    }
    return await post(client, "/generate", body, status=status)


async def test_turns_go_on_from_the_turn_that_they_name() -> None:
    async with serving() as (engine, client):
        id = await opened(client)
        first = await turn(client, "hello", id=id)
        history = [*first["prompt_token_ids"], *first["output_ids"]]
        rid = first["meta_info"]["id"]
        second = await turn(client, " more", id=id, rid=rid)
        assert second["prompt_token_ids"][: len(history)] == history
        assert second["meta_info"]["cached_tokens"] >= len(history) // 4 * 4 - 4
        whole = await post(
            client,
            "/generate",
            {"input_ids": second["prompt_token_ids"], "sampling_params": SAMPLING},
        )
        assert whole["output_ids"] == second["output_ids"]
        branch = await turn(client, " else", id=id, rid=rid, offset=3)
        assert branch["prompt_token_ids"][:3] == history[:3]
        assert len(branch["prompt_token_ids"]) == 3 + len(" else")
        alone = await turn(client, "alone", id=id)
        assert len(alone["prompt_token_ids"]) == len("alone")
        replaced = await turn(client, " new", id=id, rid=rid, replace=True)
        assert replaced["prompt_token_ids"][: len(history)] == history
        error = await turn(client, "x", 400, id=id, rid=second["meta_info"]["id"])
        assert error["error"]["param"] == "session_params.rid"
        dropped = await turn(client, "!", id=id, rid=rid, drop_previous_output=True)
        assert len(dropped["prompt_token_ids"]) == len("hello!")
        engine.check_integrity()
        done = await post(client, "/close_session", {"session_id": id})
        assert done["success"] is Done(message="").success
        await turn(client, "x", 400, id=id)
        assert engine.statistics().num_sessions == 0
        engine.check_integrity()


async def test_a_streaming_session_goes_on_from_the_last_turn() -> None:
    async with serving() as (_, client):
        id = await opened(client, streaming=True, session_id="mine")
        assert id == "mine"
        first = await turn(client, "hello", id=id)
        second = await turn(client, " more", id=id, rid=None)
        history = [*first["prompt_token_ids"], *first["output_ids"]]
        assert second["prompt_token_ids"][: len(history)] == history


async def test_completions() -> None:
    async with serving() as (_, client):
        id = await opened(client)
        body = {"prompt": "hello", "max_tokens": 4, "return_token_ids": True, "seed": 1}
        first = await post(client, "/v1/completions", {**body, "session_params": {"id": id}})
        params = {"id": id, "rid": first["id"]}
        second = await post(client, "/v1/completions", {**body, "session_params": params})
        assert second["usage"]["prompt_tokens"] == 5 + 4 + 5
        echo = {**body, "session_params": params, "echo": True}
        error = await post(client, "/v1/completions", echo, status=400)
        assert error["error"]["param"] == "echo"
        several = {**body, "prompt": ["a", "b"], "session_params": params}
        error = await post(client, "/v1/completions", several, status=400)
        assert error["error"]["param"] == "session_params.id"


async def test_a_client_that_leaves_harms_nobody() -> None:
    """Continue the next turn from before the one that was cut off, and leak nothing."""
    async with serving() as (engine, client):
        id, other = await opened(client), await opened(client)
        first = await turn(client, "hello", id=id)
        neighbour = await turn(client, "neighbour", id=other)
        params = {"id": id, "rid": first["meta_info"]["id"]}
        body = {
            "text": " cut",
            "sampling_params": {"max_new_tokens": 1000},
            "session_params": params,
            "stream": True,
        }
        for _ in range(5):
            known = engine.statistics().scheduler.num_tokens_sampled
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(client.post, "/generate", json=body))
                with trio.fail_after(20):
                    while engine.statistics().scheduler.num_tokens_sampled < known + 20:
                        await trio.sleep(0.005)
                nursery.cancel_scope.cancel()
            with trio.fail_after(30):
                while engine.statistics().num_streams:
                    await trio.sleep(0.005)
            engine.check_integrity()
            again = await turn(client, " next", **params)
            assert again["meta_info"]["prompt_tokens"] == 5 + 5 + 5
        more = await turn(client, "!", id=other, rid=neighbour["meta_info"]["id"])
        assert more["meta_info"]["prompt_tokens"] == 9 + 5 + 1


async def test_a_session_is_its_keys() -> None:
    async with serving(api_key=["first-key", "second-key"]) as (_, client):
        body = {"capacity_of_str_len": 10, "session_id": "mine"}
        await post(client, "/open_session", body, key="first-key")
        request = {"text": "x", "sampling_params": SAMPLING, "session_params": {"id": "mine"}}
        await post(client, "/generate", request, key="first-key")
        error = await post(client, "/generate", request, key="second-key", status=400)
        assert error["error"]["code"] == "session_not_found"
        closing = {"session_id": "mine"}
        await post(client, "/close_session", closing, key="second-key", status=400)
        await post(client, "/close_session", closing, key="first-key")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/open_session", {}, "capacity_of_str_len"),
        ("/open_session", {"capacity_of_str_len": 0}, "capacity_of_str_len"),
        ("/open_session", {"capacity_of_str_len": 9, "timeout": 0}, "timeout"),
        ("/open_session", {"capacity_of_str_len": 9, "session_id": ""}, "session_id"),
        ("/open_session", {"capacity_of_str_len": 9, "session_id": "taken"}, "session_id"),
        ("/close_session", {"session_id": "nobody"}, "session_id"),
        ("/generate", {"text": "x", "session_params": {"id": "nobody"}}, "session_params.id"),
        ("/generate", {"text": "x", "session_params": {"rid": "a"}}, "session_params.id"),
        ("/generate", {"text": "x", "session_params": {"id": "taken", "x": 1}}, "session_params.x"),
        ("/generate", {"text": ["x", "y"], "session_params": {"id": "taken"}}, "session_params.id"),
        (
            "/generate",
            {
                "text": "x",
                "sampling_params": {"n": 2},
                "session_params": {"id": "taken"},
            },
            "sampling_params.n",
        ),
    ],
)
async def test_what_is_wrong_is_named(path: str, body: Any, param: str) -> None:
    async with serving() as (_, client):
        await opened(client, session_id="taken")
        error = await post(client, path, body, status=400)
        assert error["error"]["param"] == param


async def test_no_session_is_meant() -> None:
    async with serving() as (engine, client):
        for params in (None, {}):
            await post(client, "/generate", {"text": "x", "session_params": params})
        id = await opened(client, timeout=1.5)
        await turn(client, "hello", id=id)
        with trio.fail_after(20):
            while engine.statistics().num_sessions:
                await trio.sleep(0.05)
        await turn(client, "hello", 400, id=id)
