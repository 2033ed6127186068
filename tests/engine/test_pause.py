"""A pause: nothing is computed meanwhile, nothing is lost, the tokens are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from tests.support.engines import assert_idle, open_compiled_engine, worker_of
from tests.support.tiny_models import make_tiny
from trioserve import Completion, DeadlineExceeded, Engine, InvalidRequest, Paused
from trioserve.protocol.errors import RequestAborted

PROMPTS = [[3 + (7 * number + place) % 200 for place in range(40)] for number in range(4)]
LENGTH = 150
SAMPLING: dict[str, Any] = {"max_tokens": LENGTH, "temperature": 0.9, "ignore_eos": True}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(
        "llama2", tmp_path_factory.mktemp("llama2"), max_position_embeddings=2048, head_dim=32
    )


class Answers:
    """Requests that run beside a test, and what has come of each."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.reasons: dict[int, str | None] = {}
        self.errors: dict[int, Exception] = {}
        self._progress = trio.Event()

    async def ask(self, engine: Engine, number: int, **options: Any) -> None:
        """Stream the answer to prompt ``number``, with that number as the seed."""
        self.tokens[number] = []
        prompt = PROMPTS[number % len(PROMPTS)]
        try:
            async with engine.generate(
                prompt, seed=number, request_id=f"request-{number}", **{**SAMPLING, **options}
            ) as stream:
                async for chunk in stream:
                    self.tokens[number].extend(chunk.token_ids)
                    self.reasons[number] = chunk.finish_reason
                    self._tell()
        except (RequestAborted, DeadlineExceeded) as error:
            self.errors[number] = error
        self._tell()

    def _tell(self) -> None:
        self._progress.set()
        self._progress = trio.Event()

    async def reach(self, length: int, numbers: range) -> None:
        """Wait until each of ``numbers`` has so many tokens."""
        with trio.fail_after(60):
            while any(len(self.tokens.get(number, ())) < length for number in numbers):
                await self._progress.wait()


async def alone(engine: Engine, number: int) -> list[int]:
    completion: Completion = await engine.complete(
        PROMPTS[number % len(PROMPTS)], seed=number, **SAMPLING
    )
    return list(completion.token_ids)


async def steps_in(engine: Engine, seconds: float) -> int:
    before = engine.statistics().scheduler.num_steps
    await trio.sleep(seconds)
    return engine.statistics().scheduler.num_steps - before


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_tokens_are_those_without_the_pause(tiny: Path, mode: str, depth: int) -> None:
    """Pause with running and with new requests; nothing is computed in between."""
    running, late = range(4), range(4, 6)
    async with open_compiled_engine(tiny, max_plans_in_flight=depth) as engine:
        expected = {number: await alone(engine, number) for number in (*running, *late)}
        answers = Answers()
        async with trio.open_nursery() as nursery:
            for number in running:
                nursery.start_soon(answers.ask, engine, number)
            await answers.reach(20, running)
            await engine.pause(mode)
            assert engine.paused
            held = engine.statistics().scheduler
            assert held.plans_in_flight == 0
            assert held.num_running == (0 if mode == "retract" else len(running))
            for number in late:
                nursery.start_soon(answers.ask, engine, number)
            num_waiting = len(late) + (len(running) if mode == "retract" else 0)
            while engine.statistics().scheduler.num_waiting < num_waiting:
                await trio.sleep(0.01)
            assert await steps_in(engine, 0.1) == 0
            assert engine.statistics().scheduler.num_waiting == num_waiting
            assert engine.healthy
            engine.check_integrity()
            assert all(len(answers.tokens[number]) < LENGTH for number in running)
            engine.resume()
        assert not engine.paused
        assert answers.tokens == expected
        await assert_idle(engine)


async def test_abort_ends_all_with_what_they_have(tiny: Path) -> None:
    async with open_compiled_engine(tiny) as engine:
        expected = [await alone(engine, number) for number in range(4)]
        answers = Answers()
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(answers.ask, engine, number)
            await answers.reach(10, range(4))
            await engine.pause()
        for number in range(4):
            got = answers.tokens[number]
            assert answers.reasons[number] == "abort"
            assert 10 <= len(got) < LENGTH
            assert got == expected[number][: len(got)]
        engine.resume()
        assert await alone(engine, 1) == expected[1]
        await assert_idle(engine)


async def test_wait_lets_those_there_are_finish_first(tiny: Path) -> None:
    async with open_compiled_engine(tiny) as engine:
        answers = Answers()
        async with trio.open_nursery() as nursery:
            for number in range(2):
                nursery.start_soon(answers.ask, engine, number)
            await answers.reach(5, range(2))
            nursery.start_soon(engine.pause, "wait")
            await trio.testing.wait_all_tasks_blocked(0.01)
            nursery.start_soon(answers.ask, engine, 2)
            with trio.fail_after(60):
                while not engine.paused:
                    await trio.sleep(0.01)
            await trio.testing.wait_all_tasks_blocked()
            assert [len(answers.tokens[number]) for number in range(3)] == [LENGTH, LENGTH, 0]
            engine.resume()
        assert len(answers.tokens[2]) == LENGTH
        await assert_idle(engine)


async def test_giving_up_to_wait_lets_everybody_in_again(tiny: Path) -> None:
    async with open_compiled_engine(tiny) as engine:
        answers = Answers()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: answers.ask(engine, 0, max_tokens=1500))
            await answers.reach(5, range(1))
            with trio.move_on_after(0.02) as scope:
                await engine.pause("wait")
            assert scope.cancelled_caught
            assert not engine.paused
            assert len(await alone(engine, 1)) == LENGTH
            nursery.cancel_scope.cancel()
        await assert_idle(engine)


async def test_refuses_if_asked_to(tiny: Path) -> None:
    async with open_compiled_engine(tiny) as engine:
        await engine.pause("in_place", refuse=True)
        with pytest.raises(Paused, match="paused"):
            await alone(engine, 0)
        with pytest.raises(InvalidRequest, match="mode is one of") as caught:
            await engine.pause("sometimes")
        assert caught.value.param == "mode"
        engine.resume()
        assert len(await alone(engine, 0)) == LENGTH


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_the_worker_dies_meanwhile(tiny: Path, mode: str) -> None:
    async with open_compiled_engine(tiny) as engine:
        expected = {number: await alone(engine, number) for number in range(3)}
        answers = Answers()
        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(answers.ask, engine, number)
            await answers.reach(20, range(3))
            await engine.pause(mode)
            (await worker_of(engine)).kill()
            with trio.fail_after(60):
                while engine.statistics().worker_restarts < 1 or not engine.healthy:
                    await trio.sleep(0.01)
            assert await steps_in(engine, 0.1) == 0
            engine.resume()
        assert answers.tokens == expected
        await assert_idle(engine)


async def test_deadlines_and_clients_that_leave_end_requests_in_a_pause(tiny: Path) -> None:
    async with open_compiled_engine(tiny) as engine:
        answers = Answers()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: answers.ask(engine, 0, timeout=3.0))
            async with trio.open_nursery() as leaving:
                leaving.start_soon(answers.ask, engine, 1)
                await answers.reach(5, range(2))
                await engine.pause("in_place")
                leaving.cancel_scope.cancel()
        assert isinstance(answers.errors[0], DeadlineExceeded)
        # What they held is given back though nothing is computed.
        await assert_idle(engine)
        assert engine.paused
        engine.resume()
        assert len(await alone(engine, 2)) == LENGTH


async def test_abort_by_name_by_prefix_and_all(tiny: Path) -> None:
    async with open_compiled_engine(tiny) as engine:
        answers = Answers()
        async with trio.open_nursery() as nursery:
            for number in (1, 10, 11, 2, 3):
                nursery.start_soon(lambda n=number: answers.ask(engine, n, max_tokens=1500))
            for number in (1, 10, 11, 2, 3):
                await answers.reach(5, range(number, number + 1))
            assert engine.abort("request-9") == 0
            assert engine.abort("request-1") == 1
            assert engine.abort("request-1") == 0
            await answers.reach(15, range(10, 12))
            assert engine.abort("request-1", prefix=True) == 2
            assert engine.abort("", prefix=True) == 2
        assert set(answers.reasons.values()) == {"abort"}
        assert all(len(tokens) < 1500 for tokens in answers.tokens.values())
        await assert_idle(engine)


async def test_flush_hides_what_was_computed(tiny: Path) -> None:
    async with open_compiled_engine(tiny) as engine:
        expected = await alone(engine, 0)
        answers = Answers()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: answers.ask(engine, 0))
            await answers.reach(5, range(1))
            hits = engine.statistics().scheduler.prefix_cache_hits
            assert hits > 0
            assert engine.flush_cache() > 0
            engine.check_integrity()
            again = await engine.complete(PROMPTS[0], max_tokens=1)
            assert again.usage.cached_tokens == 0
            once_more = await engine.complete(PROMPTS[0], max_tokens=1)
            assert once_more.usage.cached_tokens > 0
            engine.check_integrity()
        assert answers.tokens[0] == expected
        await assert_idle(engine)
