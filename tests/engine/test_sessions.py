"""Sessions: turns go on from what came before, are kept when they end well, and leak nothing."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from trioserve.engine.engine import Engine
from trioserve.engine.sessions.continuation import Continuation
from trioserve.engine.sessions.session import SESSION_PRIORITY
from trioserve.engine.sessions.turn_tree import SessionTurn, Turns
from trioserve.protocol.errors import EngineError, InvalidRequest, RequestAborted, SessionLimit
from trioserve.requests.prompts import TokensPrompt
from trioserve.requests.retention import DEFAULT_PRIORITY
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import open_fake_engine
from trioserve.testing.simulation import draw_scenario


def slow_worker(**options: Any) -> FakeWorker:
    return FakeWorker(**{"step_time": 0.01, "page_size": 4, **options})


def levels(engine: Engine) -> list[int]:
    pool = engine.schedulers[0]._core.memory.pool  # type: ignore[attr-defined]
    return sorted({pool.level(page) for page in pool.kept()})


async def nothing_left(engine: Engine) -> None:
    await trio.sleep(0.1)
    engine.check_integrity()
    statistics = engine.statistics()
    assert statistics.num_streams == statistics.num_sessions == statistics.scheduler.pages_held == 0
    assert levels(engine) in ([], [DEFAULT_PRIORITY])


SAMPLING: Any = {"max_tokens": 6, "seed": 3}


async def test_an_engine_that_is_closed_opens_none(autojump_clock: object) -> None:
    async with open_fake_engine(slow_worker) as engine:
        pass
    with pytest.raises(EngineError, match="the engine is closed"):
        engine.open_session(timeout=1.0).__enter__()
    assert engine.statistics().num_sessions == 0


async def test_a_turn_equals_the_whole_prompt(autojump_clock: object) -> None:
    async with open_fake_engine(slow_worker) as engine:
        with engine.open_session() as session:
            history: list[int] = []
            for text in ("hello there", " and more", "!"):
                turn = await session.complete(text, **SAMPLING)
                whole = await engine.complete(TokensPrompt(turn.prompt_token_ids), **SAMPLING)
                assert turn.token_ids == whole.token_ids
                assert turn.text == whole.text
                assert list(turn.prompt_token_ids[: len(history)]) == history
                history = [*turn.prompt_token_ids, *turn.token_ids]
                assert session.tokens() == history
                engine.check_integrity()
            assert turn.usage.cached_tokens >= (len(history) - 7 - 4) // 4 * 4 - 4
            assert SESSION_PRIORITY in levels(engine)
            assert len(session.turns) == 3
            assert session.num_tokens == len(history)
        await nothing_left(engine)


async def test_who_has_the_end_of_a_turn_can_go_on_from_it(autojump_clock: object) -> None:
    async with open_fake_engine(slow_worker) as engine:
        with engine.open_session() as session:
            async with session.generate("hello", request_id="a", **SAMPLING) as stream:
                async for chunk in stream:
                    if chunk.finish_reason is not None:
                        turn = await session.complete(" more", request_id="b", **SAMPLING)
            assert session.turns == ["a", "b"]
            base = [*stream.prompt_token_ids, *stream.output_token_ids]
            assert list(turn.prompt_token_ids[: len(base)]) == base
        await nothing_left(engine)


async def test_branch_offset_and_drop(autojump_clock: object) -> None:
    async with open_fake_engine(slow_worker) as engine:
        with engine.open_session() as session:
            first = await session.complete("abcdef", request_id="1", **SAMPLING)
            second = await session.complete("ghi", request_id="2", **SAMPLING)
            base = [*first.prompt_token_ids, *first.token_ids]
            assert list(second.prompt_token_ids[: len(base)]) == base

            async def prompt_of(text: str, **continuation: Any) -> list[int]:
                turn = await session.complete(
                    text, continuation=Continuation(**continuation), **SAMPLING
                )
                return list(turn.prompt_token_ids)

            new = {
                text: list((await engine.complete(text, max_tokens=1)).prompt_token_ids)
                for text in ("x", "y")
            }
            assert await prompt_of("x", after="1") == [*base, *new["x"]]
            assert await prompt_of("x", after="1", offset=4) == [*base[:4], *new["x"]]
            assert await prompt_of("x", after="1", offset=-1) == [*base[:-1], *new["x"]]
            only_prompt = list(first.prompt_token_ids)
            assert await prompt_of("x", after="1", drop_previous_output=True) == [
                *only_prompt,
                *new["x"],
            ]
            assert await prompt_of("y", anew=True) == new["y"]
            assert len(session.turns) == 7
            assert await prompt_of("x", after="1", replace=True) == [*base, *new["x"]]
            assert len(session.turns) == 3
            assert "2" not in session.turns
            engine.check_integrity()
            assert await prompt_of("y", replace=True) == new["y"]
            assert len(session.turns) == 1
            engine.check_integrity()
            with pytest.raises(InvalidRequest, match="isn't in the session") as caught:
                await prompt_of("x", after="1")
            assert caught.value.param == "after"
        await nothing_left(engine)


async def test_a_turn_that_is_cut_off_leaves_no_trace(autojump_clock: object) -> None:
    async with open_fake_engine(slow_worker) as engine:
        with engine.open_session() as session, engine.open_session() as neighbour:
            await session.complete("hello", **SAMPLING)
            await neighbour.complete("other", **SAMPLING)
            before = session.tokens()
            async with session.generate(" cut", max_tokens=500) as stream:
                await stream.receive()
            with trio.move_on_after(0.1):
                await session.complete(" cut too", max_tokens=500)
            with pytest.raises(KeyError):
                async with session.generate(" and this", max_tokens=500):
                    raise KeyError
            async with session.generate(" aborted", max_tokens=500, request_id="named") as stream:
                await stream.receive()
                engine.abort("named")
                assert [chunk.finish_reason async for chunk in stream][-1] == "abort"
            assert session.tokens() == before
            engine.check_integrity()
            turn = await session.complete(" next", **SAMPLING)
            assert list(turn.prompt_token_ids[: len(before)]) == before
            assert turn.usage.cached_tokens >= len(before) // 4 * 4 - 4
            other = await neighbour.complete(" next", **SAMPLING)
            assert len(other.prompt_token_ids) > 11
        await nothing_left(engine)


async def test_turns_at_the_same_time_are_branches(autojump_clock: object) -> None:
    async with open_fake_engine(slow_worker) as engine:
        with engine.open_session() as session:
            await session.complete("hello", request_id="root", **SAMPLING)
            base = session.tokens()

            async def ask(name: str, tokens: int) -> None:
                turn = await session.complete(name, request_id=name, max_tokens=tokens, seed=1)
                assert list(turn.prompt_token_ids[: len(base)]) == base

            async with trio.open_nursery() as nursery:
                for name, tokens in (("slow", 20), ("fast", 2)):
                    nursery.start_soon(ask, name, tokens)
                await trio.sleep(0.005)
                with pytest.raises(InvalidRequest, match="has not ended"):
                    session.generate("x", continuation=Continuation(after="slow"))
                with pytest.raises(InvalidRequest, match="already") as caught:
                    session.generate("x", request_id="slow")
                assert caught.value.param == "request_id"
            assert session.turns == ["root", "fast", "slow"]
            assert session.tokens()[: len(base)] == base
            assert session.tokens("fast") != session.tokens("slow")
            engine.check_integrity()
        await nothing_left(engine)


async def test_what_was_replaced_meanwhile_takes_its_turns_with_it(autojump_clock: object) -> None:
    async with open_fake_engine(slow_worker) as engine:
        with engine.open_session() as session:
            await session.complete("hello", request_id="root", **SAMPLING)
            async with session.generate(" a", max_tokens=30) as stream:
                anew = Continuation(replace=True)
                await session.complete("new", request_id="new", continuation=anew, **SAMPLING)
                async for _ in stream:
                    pass
            assert session.turns == ["new"]
            engine.check_integrity()
        await nothing_left(engine)


async def test_closing_ends_what_runs(autojump_clock: object) -> None:
    async with open_fake_engine(slow_worker) as engine:
        with engine.open_session("mine") as session:
            await session.complete("hello", **SAMPLING)
            async with session.generate(" long", max_tokens=500) as stream:
                await stream.receive()
                assert engine.sessions.find("mine") is session
                session.close()
                session.close()
                with pytest.raises(RequestAborted, match="session was closed"):
                    async for _ in stream:
                        pass
            with pytest.raises(InvalidRequest, match="closed"):
                await session.complete("more")
            with pytest.raises(InvalidRequest, match="no session"):
                engine.sessions.find("mine")
        await nothing_left(engine)


async def test_a_session_times_out(autojump_clock: object) -> None:
    async with open_fake_engine(slow_worker) as engine:
        long = engine.sessions.open("long", timeout=100)
        short = engine.sessions.open("short", timeout=1)
        await short.complete("hello there", **SAMPLING)
        assert SESSION_PRIORITY in levels(engine)
        for _ in range(3):
            await trio.sleep(0.9)
            await short.complete(" x", **SAMPLING)
        async with short.generate(" slow", max_tokens=400) as stream:
            await trio.sleep(3)
            async for _ in stream:
                pass
        assert not short.is_closed
        await trio.sleep(1.01)
        assert short.is_closed
        assert not long.is_closed
        assert levels(engine) == [DEFAULT_PRIORITY]
        late = engine.sessions.open(timeout=0.5)
        await trio.sleep(0.51)
        assert late.is_closed
        await trio.sleep(100)
        assert long.is_closed
        await nothing_left(engine)


async def test_limits(autojump_clock: object) -> None:
    async with open_fake_engine(slow_worker, max_sessions=2) as engine:
        with engine.open_session(capacity=20) as session, engine.open_session():
            with pytest.raises(SessionLimit, match="max-sessions"), engine.open_session():
                pass
            await session.complete("hello there", max_tokens=10)
            with pytest.raises(InvalidRequest, match="full") as caught:
                await session.complete("x")
            assert caught.value.code == "session_full"
        with engine.open_session("a") as session:
            for options, param in (
                ({"session_id": "a"}, "session_id"),
                ({"session_id": "x" * 300}, "session_id"),
                ({"capacity": 0}, "capacity"),
                ({"timeout": 0}, "timeout"),
            ):
                with pytest.raises(InvalidRequest) as caught, engine.open_session(**options):  # type: ignore[arg-type]
                    pass
                assert caught.value.param == param
            for options, param in (
                ({"n": 2}, "n"),
                ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
                ({"max_tokens": -1}, "max_tokens"),
            ):
                with pytest.raises(InvalidRequest) as caught:
                    session.generate("x", **options)  # type: ignore[arg-type]
                assert caught.value.param == param
            with pytest.raises(InvalidRequest, match="text or token ids"):
                session.generate([{"role": "user", "content": "x"}])
        await nothing_left(engine)


async def test_a_session_outlives_its_pages_and_its_worker(autojump_clock: object) -> None:
    async with open_fake_engine(lambda: slow_worker(num_pages=12)) as engine:
        with engine.open_session() as session:
            first = await session.complete("hello there", max_tokens=8, seed=1)
            for letter in "abcdef":
                await engine.complete(letter * 30, max_tokens=2)
                engine.check_integrity()
            engine.flush_cache()
            engine.check_integrity()
            turn = await session.complete(" more", **SAMPLING)
            assert turn.prompt_token_ids[:19] == (*first.prompt_token_ids, *first.token_ids)
            whole = await engine.complete(TokensPrompt(turn.prompt_token_ids), **SAMPLING)
            assert turn.token_ids == whole.token_ids
        await nothing_left(engine)


async def test_an_open_sessions_pages_go_last(autojump_clock: object) -> None:
    async with open_fake_engine(lambda: slow_worker(num_pages=14)) as engine:
        with engine.open_session() as session:
            await session.complete("hello there you", max_tokens=8)
            for letter in "abcdef":
                await engine.complete(letter * 20, max_tokens=1)
            turn = await session.complete("!", max_tokens=1)
            assert turn.usage.cached_tokens >= 20
        for letter in "abcdef":
            await engine.complete(letter * 20, max_tokens=1)
        again = await engine.complete(TokensPrompt(turn.prompt_token_ids), max_tokens=1)
        assert again.usage.cached_tokens == 0
        await nothing_left(engine)


@given(st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_the_tree_of_turns(seed: int) -> None:
    choose = random.Random(seed)
    turns = Turns()
    model: dict[str, list[int]] = {}
    for number in range(40):
        known = list(turns)
        if known and choose.random() < 0.1:
            for turn in turns.remove([choose.choice(known)]):
                del model[turn.id]
        parent = choose.choice([*known, None])
        if parent is not None and parent.id not in turns:
            continue
        before = [] if parent is None else model[parent.id]
        cut = choose.choice([len(before), choose.randint(0, len(before))])
        own = [number] * choose.randint(1, 4)
        turns.add(SessionTurn(str(number), parent, cut, array("i", own), num_prompt_tokens=1))
        model[str(number)] = before[:cut] + own
        turns.check_integrity()
        assert {turn.id: turn.tokens() for turn in turns} == model


def test_the_simulation_has_sessions_and_retention() -> None:
    scenarios = [draw_scenario(seed) for seed in range(60)]
    uses = [client.session for each in scenarios for client in each.clients if client.session]
    assert {use.how for use in uses} == {"last", "scratch", "replace"}
    assert any(client.retention for each in scenarios for client in each.clients)
