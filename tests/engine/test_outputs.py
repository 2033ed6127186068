"""Several outputs, log-probabilities of prompts and what goes with them, over the engine."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import trio
import trio.testing

from tests.engine.test_engine import settle, slow_worker
from trioserve import Engine, EngineError, Grammar, InvalidRequest, QueueFull
from trioserve.protocol import wire
from trioserve.protocol.sampling import NAN_LOGITS, NO_TOKEN, SamplerParams
from trioserve.testing import FakeWorker, WorkerDies, fake_logprobs, hashed_token
from trioserve.testing.fake_engine import open_fake_engine

Clock = trio.testing.MockClock

PROMPT = "a prompt that fills a page or two, and then some more"


async def test_n_outputs_are_those_of_one_seed_by_index(autojump_clock: Clock) -> None:
    async with open_fake_engine() as engine:
        completion = await engine.complete(PROMPT, n=4, max_tokens=10, seed=3)
        outputs = completion.outputs
        assert [output.index for output in outputs] == [0, 1, 2, 3]
        assert len({output.token_ids for output in outputs}) == 4
        assert [output.finish_reason for output in outputs] == ["length"] * 4
        usage = completion.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT), 40)
        single = await engine.complete(PROMPT, max_tokens=10, seed=3)
        assert single.token_ids == outputs[0].token_ids == completion.token_ids
        again = await engine.complete(PROMPT, n=2, max_tokens=10, seed=3)
        assert [output.token_ids for output in again.outputs] == [
            output.token_ids for output in outputs[:2]
        ]
        await settle(engine)


async def test_a_stream_of_several_outputs_ends_when_all_have(autojump_clock: Clock) -> None:
    async with open_fake_engine(slow_worker()) as engine:
        async with engine.generate(PROMPT, n=3, max_tokens=5, seed=1) as stream:
            chunks = [chunk async for chunk in stream]
        ends = [chunk.index for chunk in chunks if chunk.finish_reason is not None]
        assert ends == [0, 1, 2]
        assert len(chunks) == 15
        assert stream.usage.completion_tokens == 15
        await settle(engine)


async def test_an_output_that_stops_early_leaves_the_others_be(autojump_clock: Clock) -> None:
    async with open_fake_engine(slow_worker()) as engine:
        free = await engine.complete(PROMPT, n=3, max_tokens=20, seed=1)
        first, *others = free.outputs
        foreign = {token for output in others for token in output.token_ids}
        length, stop = next(
            (length, token)
            for length, token in enumerate(first.token_ids, 1)
            if token not in foreign
        )
        stopped = await engine.complete(PROMPT, n=3, max_tokens=20, seed=1, stop_token_ids=[stop])
        assert [output.finish_reason for output in stopped.outputs] == ["stop", "length", "length"]
        assert stopped.outputs[0].token_ids == first.token_ids[:length]
        assert stopped.outputs[1:] == free.outputs[1:]
        await settle(engine)


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.15, 0.25, 0.35, 1.0])
@pytest.mark.parametrize("depth", [1, 2])
async def test_a_caller_that_leaves_takes_every_output_along(
    autojump_clock: Clock, depth: int, seconds: float
) -> None:
    make = functools.partial(FakeWorker, step_time=0.1, max_num_batched_tokens=20)
    async with open_fake_engine(make, max_plans_in_flight=depth, max_num_seqs=4) as engine:
        with trio.move_on_after(seconds):
            await engine.complete(PROMPT, n=6, max_tokens=500, prompt_logprobs=1)
        assert engine.statistics().num_streams == 0
        await settle(engine)
        assert engine.statistics().scheduler.num_steps <= 10 * seconds + depth + 1


async def test_a_dead_worker_costs_several_outputs_nothing(autojump_clock: Clock) -> None:
    params: dict[str, Any] = {"n": 3, "max_tokens": 25, "seed": 5, "prompt_logprobs": 2}
    async with open_fake_engine() as engine:
        expected = await engine.complete(PROMPT, **params)

    def dying() -> FakeWorker:
        def script(step: int, _: wire.Plan) -> None:
            if step == 12:
                raise WorkerDies

        return FakeWorker(step_time=0.1, script=script, max_num_batched_tokens=16)

    async with open_fake_engine(dying, max_plans_in_flight=2) as engine:
        completion = await engine.complete(PROMPT, **params)
        assert engine.statistics().worker_restarts > 1
        await settle(engine)
    assert completion.outputs == expected.outputs
    assert completion.prompt_logprobs is not None
    assert expected.prompt_logprobs is not None
    ids = list(expected.prompt_token_ids)
    assert completion.prompt_logprobs.entries(ids) == expected.prompt_logprobs.entries(ids)


async def test_prompt_logprobs_are_there_with_the_first_chunk(autojump_clock: Clock) -> None:
    make = functools.partial(FakeWorker, step_time=0.1, max_num_batched_tokens=16)
    async with open_fake_engine(make) as engine:
        params: dict[str, Any] = {"prompt_logprobs": 1, "prompt_logprobs_start": 20, "n": 2}
        async with engine.generate(PROMPT, max_tokens=3, **params) as stream:
            await stream.receive()
            ids = stream.prompt_token_ids
            assert stream.prompt_logprobs is not None
            entries = stream.prompt_logprobs.entries(ids)
        assert len(entries) == len(ids) - 20
        for position, entry in enumerate(entries, 20):
            expected = fake_logprobs(ids[:position], engine.vocab_size)
            assert (entry.token_id, entry.logprob) == (ids[position], expected[ids[position]])
            assert entry.top[0][0] == int(expected.argmax())
            assert entry.rank == 1 + int((expected > entry.logprob).sum())
        await settle(engine)


async def test_no_tokens_can_be_asked_for(autojump_clock: Clock) -> None:
    async with open_fake_engine() as engine:
        completion = await engine.complete(PROMPT, n=2, max_tokens=0, prompt_logprobs=0, logprobs=1)
        assert [output.token_ids for output in completion.outputs] == [(), ()]
        assert [output.text for output in completion.outputs] == ["", ""]
        assert [output.finish_reason for output in completion.outputs] == ["length"] * 2
        assert [output.logprobs for output in completion.outputs] == [(), ()]
        assert completion.usage.total_tokens == len(PROMPT)
        assert completion.prompt_logprobs is not None
        assert completion.prompt_logprobs.stop == len(PROMPT)
        again = await engine.complete(PROMPT, max_tokens=1)
        assert again.usage.cached_tokens == 48
        await settle(engine)


async def test_the_queue_has_room_for_every_output_or_refuses(autojump_clock: Clock) -> None:
    async with open_fake_engine(slow_worker(), max_num_seqs=1, max_num_queued_reqs=4) as engine:
        with pytest.raises(InvalidRequest, match=r"n must be at most 4 .*got 5") as caught:
            await engine.complete("a", n=5)
        assert caught.value.param == "n"
        async with engine.generate("a", max_tokens=100, n=3) as running:
            await running.receive()
            with pytest.raises(QueueFull, match=r"2 requests are waiting.*has 3 outputs"):
                await engine.complete("b", n=3)
            async with engine.generate("c", n=2):
                with pytest.raises(QueueFull, match="4 requests are waiting"):
                    await engine.complete("d")
        await settle(engine)


async def test_outputs_count_once_each_on_their_way_into_the_queue(autojump_clock: Clock) -> None:
    counts: list[int] = []
    async with open_fake_engine(max_num_seqs=1) as engine:

        async def enter() -> None:
            async with engine.generate("hello", max_tokens=2, n=3):
                pass

        for _ in range(20):  # trio runs what is ready in a random order
            async with trio.open_nursery() as nursery:
                nursery.start_soon(enter)
                await trio.lowlevel.checkpoint()
                while engine.statistics().num_streams:
                    statistics = engine.statistics()
                    counts.append(statistics.num_tokenizing + statistics.scheduler.num_waiting)
                    engine.check_integrity()
                    await trio.lowlevel.checkpoint()
        assert max(counts) == 3
        await settle(engine)


@pytest.mark.parametrize(
    ("params", "given", "error", "param"),
    [
        ({}, NAN_LOGITS, EngineError, None),
        ({"allowed_token_ids": [1]}, NO_TOKEN, InvalidRequest, "allowed_token_ids"),
        ({"allowed_token_ids": [1]}, NAN_LOGITS, EngineError, None),
    ],
)
async def test_no_token_to_draw_ends_a_stream_with_one_error(
    autojump_clock: Clock,
    params: dict[str, Any],
    given: int,
    error: type[Exception],
    param: str | None,
) -> None:
    draw = hashed_token(256)

    def token(context: list[int], sampler: SamplerParams) -> int:
        is_due = sampler.sequence_index == 1 and len(context) == len(PROMPT) + 3
        return given if is_due else draw(context, sampler)

    async with open_fake_engine(lambda: FakeWorker(step_time=0.1, token=token)) as engine:
        async with engine.generate("another", max_tokens=30) as other:
            with pytest.raises(error, match=r"logits hold NaN|leaves no token") as caught:
                await engine.complete(PROMPT, n=3, max_tokens=30, **params)
            assert getattr(caught.value, "param", None) == param
            assert engine.statistics().scheduler.num_corrupted == (param is None)
            assert engine.statistics().scheduler.num_running == 1
            assert len([token async for chunk in other for token in chunk.token_ids]) == 30
        await settle(engine)


async def test_a_fake_worker_keeps_to_the_tokens_that_are_allowed(autojump_clock: Clock) -> None:
    async with open_fake_engine() as engine:
        allowed = {3, 50, 99}
        completion = await engine.complete(PROMPT, max_tokens=30, allowed_token_ids=list(allowed))
        assert set(completion.token_ids) == allowed


async def test_fields_that_this_server_cannot_serve_are_refused_by_name(
    autojump_clock: Clock,
) -> None:
    async with open_fake_engine(max_logprobs=3) as engine:
        for params, name in (
            ({"prompt_logprobs": 4}, "prompt_logprobs"),
            ({"prompt_logprobs": 1, "prompt_logprobs_start": 9}, "prompt_logprobs_start"),
            ({"allowed_token_ids": [1, 256]}, "allowed_token_ids"),
            ({"logprobs": 1, "logprob_token_ids": [256]}, "logprob_token_ids"),
            ({"extra_args": {"strength": 1}}, "extra_args"),
            ({"n": 0}, "n"),
        ):
            with pytest.raises(InvalidRequest) as caught:
                await engine.complete("hello", **params)
            assert caught.value.param == name
            assert name in str(caught.value)
        await settle(engine)
    async with open_fake_engine(logits_processors=("package:Class",)) as engine:
        await engine.complete("hello", extra_args={"strength": 1}, max_tokens=1)


async def test_the_worker_is_told_all_that_it_has_to_know(autojump_clock: Clock) -> None:
    told: list[SamplerParams] = []

    class Recording(FakeWorker):
        def step(self, plan: wire.Plan) -> wire.StepResult | wire.Failure:
            told.extend(opened.sampler for opened in plan.opened)
            return super().step(plan)

    grammar = Grammar("regex", "[a-z]+")
    async with open_fake_engine(Recording, logits_processors=("package:Class",)) as engine:
        await engine.complete(
            "hello",
            n=2,
            seed=7,
            max_tokens=1,
            prompt_logprobs=2,
            logprobs=1,
            logprob_token_ids=[5, 6],
            allowed_token_ids=[65, 66],
            bad_words=["no"],
            grammar=grammar,
            extra_args={"strength": 1},
        )
        expected = SamplerParams(
            seed=7,
            prompt_logprobs=2,
            logprobs=1,
            logprob_token_ids=[5, 6],
            allowed_token_ids=[65, 66],
            bad_words=[engine.tokenizer.encode("no")],
            grammar=grammar,
            extra_args={"strength": 1},
        )
    assert [params.sequence_index for params in told] == [0, 1]
    assert told[0] == expected


async def test_a_fake_worker_is_asked_to_prepare(autojump_clock: Clock) -> None:
    async with open_fake_engine() as engine:
        assert await engine.call_worker("prepare", {"grammar": None, "extra_args": {}}) is None
    refusal = {"error": "too large", "param": "grammar"}
    worker = FakeWorker(calls={"prepare": lambda _: refusal})
    async with open_fake_engine(lambda: worker) as engine:
        assert await prepare(engine) == refusal


async def prepare(engine: Engine) -> Any:
    return await engine.call_worker("prepare", {"grammar": ["regex", "a"], "extra_args": {}})
