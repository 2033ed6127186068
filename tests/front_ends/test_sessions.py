"""Sessions of a server with several front ends: the same as in one process, over whichever."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.support.front_ends import Server, open_server
from trioserve import Completion, InvalidRequest
from trioserve.engine.sessions.continuation import Continuation
from trioserve.http.api.server_api import LocalServer, ServerApi
from trioserve.protocol.errors import DeadlineExceeded, RequestAborted, SessionLimit
from trioserve.requests.generation import GenerationStream, completion_of
from trioserve.requests.prompts import ChatPrompt, TokensPrompt
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import open_fake_engine

SAMPLING: dict[str, Any] = {"max_tokens": 6, "seed": 3}
LONG: dict[str, Any] = {"max_tokens": 1000, "seed": 3}


def slow_worker() -> FakeWorker:
    return FakeWorker(step_time=0.01, page_size=4)


async def opened(server_api: ServerApi, id: str | None = None, **options: Any) -> str:
    defaults = {"capacity": 1000, "timeout": 600.0, "owner": None, "tenant": "", "goes_on": False}
    return await server_api.open_session(id, **{**defaults, **options})


def generation(
    server_api: ServerApi, session: str, prompt: Any, *, owner: str | None = None, **options: Any
) -> contextlib.AbstractAsyncContextManager[GenerationStream]:
    """Generate a turn; options that no request has are those of its continuation."""
    names = ("after", "offset", "replace", "drop_previous_output")
    continuation = Continuation(**{name: options.pop(name) for name in names if name in options})
    return server_api.turn(session, owner, continuation)(prompt, **{**SAMPLING, **options})


async def turn(server_api: ServerApi, session: str, prompt: Any, **options: Any) -> Completion:
    async with generation(server_api, session, prompt, **options) as stream:
        chunks = [chunk async for chunk in stream]
    return completion_of(stream, chunks)


async def conversation(wholes: Sequence[ServerApi], seed: int) -> list[Any]:
    """Return the results of a conversation's turns and mistakes, each over a random process."""
    choose = random.Random(seed)

    def some() -> ServerApi:
        return choose.choice(wholes)

    found: list[Any] = []

    async def ask(session: str, prompt: Any, **options: Any) -> None:
        try:
            completion = await turn(some(), session, prompt, **options)
        except InvalidRequest as error:
            found.append((error.param, error.code, str(error)))
        else:
            found.append((completion.prompt_token_ids, completion.outputs))

    first = await opened(some(), "first")
    other = await opened(some(), "other", goes_on=True, owner="key-1", capacity=40)
    await ask(first, "hello there", request_id="a")
    await ask(first, " and more", request_id="b", after="a")
    await ask(first, TokensPrompt((9, 8, 7)), request_id="c", after="b")
    await ask(first, "alone", request_id="d")
    await ask(first, " branch", request_id="e", after="a", offset=4)
    await ask(first, " less", request_id="f", after="b", offset=-1)
    await ask(first, "!", request_id="g", after="b", drop_previous_output=True)
    await ask(first, " instead", request_id="h", after="a", replace=True)
    await ask(first, "x", after="b")
    await ask(first, "x", after="nobody")
    await ask(first, "x", request_id="h")
    await ask(first, "x", n=2)
    await ask(first, "x", max_tokens=-1)
    await ask(first, ChatPrompt(messages=({"role": "user", "content": "x"},)))
    await ask(other, "x")
    for text in ("one", "two", "three", "four", "five", "six", "seven"):
        await ask(other, text, owner="key-1")
    await ask(first, " on", after="h")
    for id, owner in (("other", None), ("first", None), ("first", None)):
        try:
            await some().close_session(id, owner)
        except InvalidRequest as error:
            found.append((error.param, error.code, str(error)))
    await ask(first, "x", after="h")
    for options in ({"capacity": 0}, {"id": "other", "owner": "key-1"}, {"timeout": -1.0}):
        with pytest.raises(InvalidRequest) as caught:
            await opened(some(), **options)  # type: ignore[arg-type]
        found.append((caught.value.param, str(caught.value)))
    return found


async def nothing_left(server: Server) -> None:
    """Wait until no turn runs, then assert that nothing is kept for one, nor for a session."""
    await server.wait_nothing_held()
    with trio.fail_after(20):
        while any(each.peer._turns._running for each in server.front_ends):
            await trio.sleep(0.005)
    server.engine_server.check_integrity()
    assert server.engine_server.statistics().num_sessions == 0
    assert server.engine_server.schedulers.pins.names() == set()


@pytest.mark.parametrize("seed", range(4))
async def test_a_conversation_is_that_of_one_process(tmp_path: Path, seed: int) -> None:
    async with open_fake_engine(lambda: FakeWorker(page_size=4)) as engine:
        expected = await conversation([LocalServer(engine)], seed)
        assert len(engine.sessions) == 1
    async with open_server(tmp_path, lambda: FakeWorker(page_size=4), count=3) as server:
        wholes = [each.server_api for each in server.front_ends]
        assert await conversation(wholes, seed) == expected
        assert (await wholes[0].statistics()).num_sessions == 1
        assert 'trioserve:sessions{engine="0",model_name="fake"} 1.0' in (
            (await wholes[1].metrics()).decode()
        )
        await wholes[2].close_session("other", "key-1")
        await nothing_left(server)


async def test_who_has_the_end_of_a_turn_can_go_on_from_it(tmp_path: Path) -> None:
    """However soon, and over whichever front end."""
    async with open_server(tmp_path) as server:
        first, second = (each.server_api for each in server.front_ends)
        id = await opened(first)
        before: str | None = None
        for number in range(30):
            async with generation(first, id, "x", request_id=str(number), after=before) as stream:
                chunks = [await stream.receive()]
                while chunks[-1].finish_reason is None:
                    chunks.append(await stream.receive())
                # The block isn't even left.
                reply = f"{number} and on"
                await turn(second, id, "y", request_id=reply, after=str(number), max_tokens=1)
                before = reply
            first, second = second, first
        assert len(server.engine_server.sessions.find(id).turns) == 60
        await first.close_session(id, None)
        await nothing_left(server)


async def test_what_is_computed_is_found_by_the_next_turn(tmp_path: Path) -> None:
    async with open_server(tmp_path, slow_worker) as server:
        first, second = (each.server_api for each in server.front_ends)
        id = await opened(first)
        start = await turn(first, id, "a beginning of some length", request_id="a")
        more = await turn(second, id, " and more", after="a")
        length = len(start.prompt_token_ids) + len(start.token_ids)
        assert more.usage.cached_tokens >= length - 8
        assert server.engine_server.schedulers.pins.names() != set()
        await first.close_session(id, None)
        await nothing_left(server)


async def test_a_turn_that_is_left_leaves_no_trace(tmp_path: Path) -> None:
    async with open_server(tmp_path, slow_worker) as server:
        first, second = (each.server_api for each in server.front_ends)
        id = await opened(first, goes_on=True)
        await turn(first, id, "hello", request_id="a")
        session = server.engine_server.sessions.find(id)
        before = session.tokens()
        async with generation(second, id, " cut", **LONG) as stream:
            await stream.receive()
        with pytest.raises(KeyError):
            async with generation(first, id, " cut", **LONG):
                raise KeyError
        with pytest.raises(DeadlineExceeded):
            await turn(second, id, " late", **LONG, timeout=0.1)
        # At whatever moment: while it begins, runs, or has just ended.
        for patience in (0.0, 0.0002, 0.001, 0.002, 0.005, 0.02, 0.04):
            with trio.move_on_after(patience):
                await turn(first, id, " cut", **LONG)
        await server.wait_nothing_held()
        with trio.fail_after(20):
            while session._running:
                await trio.sleep(0.005)
        assert session.turns == ["a"]
        assert session.deadline < math.inf
        again = await turn(second, id, " next", request_id="b")
        assert list(again.prompt_token_ids[: len(before)]) == before
        await second.close_session(id, None)
        await nothing_left(server)


async def test_reading_the_last_chunk_can_be_cancelled(tmp_path: Path) -> None:
    """Check that nothing is lost, and that the turn is kept once."""
    async with open_server(tmp_path) as server:
        (first, second) = (each.server_api for each in server.front_ends)
        id = await opened(first)
        expected = await turn(second, id, "hello")
        for number in range(20):
            async with generation(first, id, "hello", request_id=str(number)) as stream:
                chunks = []
                patience = 0.0
                while not chunks or chunks[-1].finish_reason is None:
                    with trio.move_on_after(patience):
                        chunks.append(await stream.receive())
                    patience += 0.0001
            assert completion_of(stream, chunks).outputs == expected.outputs
        assert server.engine_server.sessions.find(id).turns[1:] == [str(each) for each in range(20)]
        await second.close_session(id, None)
        await nothing_left(server)


async def test_closing_ends_what_runs_over_another_front_end(tmp_path: Path) -> None:
    async with open_server(tmp_path, slow_worker) as server:
        first, second = (each.server_api for each in server.front_ends)
        id, neighbour = await opened(first), await opened(second)
        async with (
            generation(second, id, "hello", **LONG) as stream,
            generation(second, neighbour, "other", max_tokens=60) as other,
        ):
            await stream.receive()
            await first.close_session(id, None)
            with pytest.raises(RequestAborted, match="session was closed"):
                async for _ in stream:
                    pass
            assert [chunk async for chunk in other][-1].finish_reason == "length"
        assert len(server.engine_server.sessions.find(neighbour).turns) == 1
        await first.close_session(neighbour, None)
        await nothing_left(server)


async def test_a_session_times_out_whoever_used_it_last(tmp_path: Path) -> None:
    async with open_server(tmp_path, slow_worker) as server:
        first, second = (each.server_api for each in server.front_ends)
        id = await opened(first, timeout=1.5)
        session = server.engine_server.sessions.find(id)
        async with generation(second, id, "slow", max_tokens=200) as stream:
            assert len([chunk async for chunk in stream]) > 0
            assert not session.is_closed
        with trio.fail_after(20):
            while not session.is_closed:
                await trio.sleep(0.01)
        with pytest.raises(InvalidRequest) as caught:
            await turn(first, id, "late")
        assert caught.value.code == "session_not_found"
        await nothing_left(server)


async def test_there_are_so_many_sessions_over_all(tmp_path: Path) -> None:
    async with open_server(tmp_path, max_sessions=2) as server:
        first, second = (each.server_api for each in server.front_ends)
        ids = [await opened(first), await opened(second)]
        with pytest.raises(SessionLimit, match="--max-sessions"):
            await opened(first)
        for id in ids:
            await first.close_session(id, None)
        await nothing_left(server)


async def test_a_front_end_that_dies_takes_its_turns_and_no_session(tmp_path: Path) -> None:
    async with open_server(tmp_path, slow_worker) as server:
        first, second = server.front_ends
        mine, other = await opened(first.server_api), await opened(first.server_api)
        await turn(first.server_api, mine, "hello", request_id="a")
        before = server.engine_server.sessions.find(mine).tokens()

        async def run_on() -> None:
            # What its clients see isn't the engine process's business any more.
            with contextlib.suppress(Exception):
                await turn(first.server_api, mine, " lost", after="a", request_id="b", **LONG)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_on)
            async with generation(second.server_api, other, "neighbour", max_tokens=60) as stream:
                with trio.fail_after(20):
                    while not server.engine_server.sessions.find(mine)._running:
                        await trio.sleep(0.005)
                first.life.cancel()
                await first.gone.wait()
                assert server.engine_server.sessions.find(mine).turns == ["a"]
                assert server.engine_server.sessions.find(mine).deadline < math.inf
                # Its place is free, and its name.
                again = await turn(second.server_api, mine, " again", after="a", request_id="b")
                assert list(again.prompt_token_ids[: len(before)]) == before
                assert [chunk async for chunk in stream][-1].finish_reason == "length"
            nursery.cancel_scope.cancel()
        assert len(server.engine_server.sessions.find(other).turns) == 1
        for id in (mine, other):
            await second.server_api.close_session(id, None)
        with trio.fail_after(20):
            while not server.engine_server.idle:
                await trio.sleep(0.005)
        server.engine_server.check_integrity()
        assert server.engine_server.schedulers.pins.names() == set()
