"""The engine over the simulation: scopes, deadlines, bounds, failures, worker deaths."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from trioserve import (
    ChatPrompt,
    ContextTooLong,
    DeadlineExceeded,
    Draining,
    Engine,
    EngineError,
    InvalidRequest,
    QueueFull,
    SamplingParams,
    SlowReader,
    TextPrompt,
    TokensPrompt,
)
from trioserve.protocol import wire
from trioserve.testing import FakeWorker, StepFails, WorkerDies
from trioserve.testing.fake_engine import open_fake_engine

Clock = trio.testing.MockClock


def slow_worker(step_time: float = 0.1) -> Callable[[], FakeWorker]:
    return lambda: FakeWorker(step_time=step_time)


async def settle(engine: Engine) -> None:
    """Let what was left behind be worked off, then demand that nothing is."""
    await trio.sleep(10)
    engine.check_integrity()
    statistics = engine.statistics()
    assert statistics.num_streams == statistics.num_tokenizing == statistics.stream_bytes == 0
    scheduler = statistics.scheduler
    assert scheduler.num_running == scheduler.num_waiting == scheduler.pages_held == 0
    assert scheduler.pages_free + scheduler.pages_cached == scheduler.pages_total


async def test_text_ids_and_messages_are_prompts(autojump_clock: Clock) -> None:
    async with open_fake_engine() as engine:
        text = await engine.complete("user: hi\nassistant:", max_tokens=8, seed=1)
        messages = [{"role": "user", "content": "hi"}]
        chat = await engine.complete(messages, max_tokens=8, seed=1)
        prompt = ChatPrompt(messages=tuple(messages))
        also_chat = await engine.complete(prompt, SamplingParams(max_tokens=8, seed=1))
        ids = engine.tokenizer.encode("user: hi\nassistant:")
        from_ids = await engine.complete(ids, max_tokens=8, seed=1)
        assert text.token_ids == chat.token_ids == also_chat.token_ids == from_ids.token_ids
        assert text.usage.prompt_tokens == len(ids)
        assert text.usage.completion_tokens == 8
        await settle(engine)


async def test_chunks_add_up_to_the_completion(autojump_clock: Clock) -> None:
    async with open_fake_engine(slow_worker()) as engine:
        whole = await engine.complete("hello", max_tokens=20, seed=3, logprobs=2)
        async with engine.generate("hello", max_tokens=20, seed=3, logprobs=2) as stream:
            chunks = [chunk async for chunk in stream]
        assert len(chunks) == 20
        assert "".join(chunk.text for chunk in chunks) == whole.text
        assert tuple(i for chunk in chunks for i in chunk.token_ids) == whole.token_ids
        assert whole.logprobs is not None
        assert [entry.token_id for entry in whole.logprobs] == list(whole.token_ids)
        assert all(len(entry.top) == 2 for entry in whole.logprobs)
        assert [chunk.finish_reason for chunk in chunks] == [None] * 19 + ["length"]


async def test_the_same_seed_gives_the_same_tokens_and_another_another(
    autojump_clock: Clock,
) -> None:
    async with open_fake_engine() as engine:
        one, same, other = [
            (await engine.complete("hello", max_tokens=10, seed=seed)).token_ids
            for seed in (5, 5, 6)
        ]
        assert one == same != other
        fresh = [(await engine.complete("hello", max_tokens=10)).token_ids for _ in range(2)]
        assert fresh[0] != fresh[1]


async def test_an_engine_seed_makes_a_whole_run_repeatable(autojump_clock: Clock) -> None:
    runs = []
    for _ in range(2):
        async with open_fake_engine(seed=11) as engine:
            runs.append([(await engine.complete("a", max_tokens=9)).token_ids for _ in range(3)])
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 3


async def test_the_model_s_end_stops_an_output_unless_it_is_ignored(autojump_clock: Clock) -> None:
    async with open_fake_engine() as engine:
        whole = await engine.complete("hello", max_tokens=12, seed=3)
        end = whole.token_ids[5]
        length = whole.token_ids.index(end) + 1
        asked = await engine.complete("hello", max_tokens=12, seed=3, stop_token_ids=[end])
        assert (asked.finish_reason, asked.stop_reason) == ("stop", end)
    async with open_fake_engine(eos_token_ids=(end,)) as engine:
        stopped = await engine.complete("hello", max_tokens=12, seed=3)
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", None)
        assert stopped.token_ids == asked.token_ids == whole.token_ids[:length]
        assert stopped.text == engine.tokenizer.decode(whole.token_ids[: length - 1])
        ignored = await engine.complete("hello", max_tokens=12, seed=3, ignore_eos=True)
        assert (ignored.token_ids, ignored.finish_reason) == (whole.token_ids, "length")
        late = await engine.complete("hello", max_tokens=12, seed=3, min_tokens=length + 1)
        assert len(late.token_ids) > length


async def test_the_model_s_defaults_apply_to_what_a_caller_leaves_out(
    autojump_clock: Clock,
) -> None:
    seen: list[float] = []

    class Recording(FakeWorker):
        def step(self, plan: wire.Plan) -> wire.StepResult | wire.Failure:
            seen.extend(opened.sampler.temperature for opened in plan.opened)
            return super().step(plan)

    async with open_fake_engine(Recording, generation_defaults={"temperature": 0.3}) as engine:
        await engine.complete("a", max_tokens=1)
        await engine.complete("a", max_tokens=1, temperature=0.7)
    assert seen == [0.3, 0.7]


async def test_latencies_count_from_the_arrival(autojump_clock: Clock) -> None:
    async with open_fake_engine(slow_worker()) as engine:
        await trio.sleep(10)
        arrived = trio.current_time() - 4  # its body was read meanwhile
        async with engine.generate("hello", max_tokens=3, arrived=arrived) as stream:
            async for _ in stream:
                pass
        assert stream.times.arrived == arrived
        assert 4 <= engine.metrics.time_to_first_token.total < 6
        assert 4 <= engine.metrics.e2e_latency.total < 6
        later = trio.current_time() + 5
        async with engine.generate("hello", max_tokens=1, arrived=later) as stream:
            assert stream.times.arrived <= trio.current_time()
        for wrong in (math.inf, -math.inf, math.nan):
            with pytest.raises(InvalidRequest, match="arrived must be a time"):
                engine.generate("hello", arrived=wrong)


@pytest.mark.parametrize("leave_after", [0, 1, 7])
async def test_leaving_the_block_aborts(autojump_clock: Clock, leave_after: int) -> None:
    async with open_fake_engine(slow_worker()) as engine:
        async with engine.generate("hello", max_tokens=1000) as stream:
            for _ in range(leave_after):
                await stream.receive()
        await settle(engine)
        steps = engine.statistics().scheduler.num_steps
        assert steps <= leave_after + 3


async def test_a_timeout_ends_the_request_in_the_queue_and_while_it_runs(
    autojump_clock: Clock,
) -> None:
    async with open_fake_engine(slow_worker(), max_num_seqs=1) as engine:
        with pytest.raises(DeadlineExceeded, match=r"timeout of 2 s"):
            async with engine.generate("hello", max_tokens=1000, timeout=2) as running:
                await running.receive()
                with pytest.raises(DeadlineExceeded, match=r"timeout of 1 s"):
                    await engine.complete("waits", max_tokens=5, timeout=1)
                assert trio.current_time() < 2
                async for _ in running:
                    pass
        await settle(engine)


async def test_a_full_queue_refuses_with_the_limit(autojump_clock: Clock) -> None:
    async with open_fake_engine(slow_worker(), max_num_seqs=1, max_num_queued_reqs=2) as engine:
        async with engine.generate("a", max_tokens=100) as running:
            await running.receive()
            async with engine.generate("b"), engine.generate("c"):
                with pytest.raises(QueueFull, match=r"2 requests are waiting; the limit is 2"):
                    await engine.complete("d")
            async with engine.generate("e"):
                pass
        await settle(engine)


async def test_a_draining_engine_finishes_what_runs_and_admits_nothing(
    autojump_clock: Clock,
) -> None:
    async with open_fake_engine(slow_worker()) as engine:
        async with trio.open_nursery() as nursery:
            async with engine.generate("a", max_tokens=30) as stream:
                await stream.receive()
                engine.drain()
                assert not engine.healthy
                with pytest.raises(Draining):
                    await engine.complete("b")
                idle = trio.Event()

                async def wait() -> None:
                    await engine.wait_idle()
                    idle.set()

                nursery.start_soon(wait)
                reasons = []
                async for chunk in stream:
                    assert not idle.is_set()
                    reasons.append(chunk.finish_reason)
                assert reasons[-1] == "length"
            await idle.wait()


async def test_bad_requests_name_the_field_and_leave_nothing(autojump_clock: Clock) -> None:
    async with open_fake_engine(max_logprobs=3) as engine:
        for prompt, sampling, param in (
            ("a", {"temperature": -1}, "temperature"),
            ("a", {"nonsense": 1}, "nonsense"),
            ("a", {"logprobs": 4}, "logprobs"),
            ("a", {"logit_bias": {999: 1}}, "logit_bias"),
            ("a", {"stop_token_ids": [256]}, "stop_token_ids"),
            ([1, 256], {}, "prompt"),
            ([1, -1], {}, "prompt"),
            ([], {}, "prompt"),
            ([1, "a"], {}, "prompt"),
            ("", {}, "prompt"),
            ("a", {"max_tokens": 5000}, "max_tokens"),
            ("a" * 5000, {}, "prompt"),
            ("a" * 50_000_000, {}, "prompt"),
        ):
            with pytest.raises(InvalidRequest) as caught:
                await engine.complete(prompt, **sampling)  # type: ignore[arg-type]
            assert caught.value.param == param
        for wrong in (256, 1000):
            with pytest.raises(InvalidRequest, match=f"outside 0 to 255: {wrong}$"):
                await engine.complete([1, wrong])
        with pytest.raises(ContextTooLong, match=r"2048 tokens"):
            await engine.complete("a" * 3000)
        await settle(engine)


async def test_a_block_s_own_exception_comes_out_as_it_is(autojump_clock: Clock) -> None:
    error = KeyError("mine")
    with pytest.raises(KeyError) as caught:
        async with open_fake_engine(slow_worker()) as engine:
            async with engine.generate("a", max_tokens=100) as stream:
                await stream.receive()
                raise error
    assert caught.value is error
    assert caught.value.__context__ is None

    group = ExceptionGroup("two", [ValueError("a"), ValueError("b")])
    with pytest.raises(ExceptionGroup) as caught_group:
        async with open_fake_engine():
            raise group
    assert caught_group.value is group


async def test_cancelling_the_block_is_just_a_cancellation(autojump_clock: Clock) -> None:
    with trio.move_on_after(1) as scope:
        async with open_fake_engine(slow_worker()) as engine:
            async with engine.generate("a", max_tokens=1000) as stream:
                async for _ in stream:
                    pass
    assert scope.cancelled_caught


async def test_a_stream_that_outlives_its_engine_ends_with_an_error(autojump_clock: Clock) -> None:
    outcome: list[str] = []

    async def use(engine: Engine) -> None:
        with pytest.raises(EngineError, match="closed"):
            async with engine.generate("a", max_tokens=1000) as stream:
                async for _ in stream:
                    pass
        outcome.append("ended")

    async with trio.open_nursery() as nursery:
        async with open_fake_engine(slow_worker()) as engine:
            nursery.start_soon(use, engine)
            await trio.sleep(1)
    assert outcome == ["ended"]
    with pytest.raises(EngineError, match="closed"):
        await engine.complete("too late")


async def test_two_engines_don_t_meet(autojump_clock: Clock) -> None:
    async with open_fake_engine() as one, open_fake_engine() as other:
        a = await one.complete("hello", max_tokens=10, seed=1)
        b = await other.complete("hello", max_tokens=10, seed=1)
        assert a.token_ids == b.token_ids
        for engine in (one, other):
            assert engine.statistics().scheduler.num_tokens_sampled == 10
        one.drain()
        assert other.healthy


async def test_a_reader_that_falls_behind_is_aborted_and_the_others_are_not(
    autojump_clock: Clock,
) -> None:
    async with open_fake_engine(slow_worker(), max_stream_bytes=1024) as engine:
        async with engine.generate("slow", max_tokens=1000) as slow:
            reader = await engine.complete("fast", max_tokens=100)
            assert len(reader.token_ids) == 100
            with pytest.raises(SlowReader, match="max_stream_bytes"):
                async for _ in slow:
                    pass
            assert engine.statistics().scheduler.num_running == 0
        await settle(engine)


async def test_slow_readers_are_bounded_together_and_cost_a_fast_one_nothing(
    autojump_clock: Clock,
) -> None:
    limits = {"max_stream_bytes": 100_000, "max_total_stream_bytes": 4096}
    async with open_fake_engine(slow_worker(), **limits) as engine:
        async with contextlib.AsyncExitStack() as stack:
            generations = [engine.generate(f"slow {n}", max_tokens=1000) for n in range(3)]
            slow = [await stack.enter_async_context(each) for each in generations]
            reader = await engine.complete("fast", max_tokens=300)
            assert len(reader.token_ids) == 300
            assert engine.statistics().scheduler.num_running == 0
            assert engine.statistics().stream_bytes <= 4096
            for stream in slow:
                with pytest.raises(SlowReader, match="max_total_stream_bytes"):
                    async for _ in stream:
                        pass
        await settle(engine)


async def test_the_reader_that_left_the_most_makes_room_and_the_others_lose_nothing(
    autojump_clock: Clock,
) -> None:
    limits = {"max_stream_bytes": 100_000, "max_total_stream_bytes": 20_000}
    async with open_fake_engine(slow_worker(), **limits) as engine:
        async with (
            engine.generate("large", max_tokens=1000, ignore_eos=True) as large,
            engine.generate("small", max_tokens=250, ignore_eos=True) as small,
        ):
            for _ in range(10):
                await trio.sleep(10)
                if engine.statistics().scheduler.num_running == 1:
                    (small_chunk,) = [await small.receive()]
                    assert len(small_chunk.token_ids) > 50
            with pytest.raises(SlowReader, match="max_total_stream_bytes"):
                await large.receive()
            assert engine.statistics().scheduler.num_running == 0
            length = len(small_chunk.token_ids)
            async for chunk in small:
                length += len(chunk.token_ids)
            assert length == 250
        await settle(engine)


async def test_a_dead_worker_is_a_pause(autojump_clock: Clock) -> None:
    """Several deaths while requests run: the streams go on, and the tokens are the same."""
    async with open_fake_engine(slow_worker()) as engine:
        expected = [
            (await engine.complete(f"request {i}", max_tokens=40, seed=i)).token_ids
            for i in range(5)
        ]

    def dying() -> FakeWorker:
        def script(step: int, plan: wire.Plan) -> None:
            if step == 9:
                raise WorkerDies

        workers.append(FakeWorker(step_time=0.1, script=script))
        return workers[-1]

    workers: list[FakeWorker] = []
    results: dict[int, tuple[int, ...]] = {}
    async with open_fake_engine(dying, max_plans_in_flight=2) as engine:

        async def run(number: int) -> None:
            await trio.sleep(number * 0.15)
            completion = await engine.complete(f"request {number}", max_tokens=40, seed=number)
            results[number] = completion.token_ids

        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(run, number)
        assert engine.statistics().worker_restarts == len(workers) - 1 >= 3
        # Workers were replaced only when they died: each did its nine steps.
        assert all(worker.num_steps == 9 for worker in workers[:-1])
        await settle(engine)
    assert [results[number] for number in range(5)] == expected


async def test_deaths_without_progress_end_the_engine_with_one_error(
    autojump_clock: Clock,
) -> None:
    def script(step: int, plan: wire.Plan) -> None:
        raise WorkerDies

    blamed = 0
    with pytest.raises(EngineError, match="the engine failed") as caught:
        async with open_fake_engine(lambda: FakeWorker(script=script)) as engine:
            while True:
                with pytest.raises(EngineError) as error:
                    await engine.complete("a", max_tokens=5)
                if "the worker failed on this request" not in str(error.value):
                    raise error.value
                blamed += 1
    assert caught.value.__cause__ is not None
    # The first death of each request is one too many, the second one finds it guilty.
    assert blamed == engine.config.max_worker_restarts
    assert engine.statistics().worker_restarts == 2 * engine.config.max_worker_restarts


async def test_a_failing_plan_fails_only_who_is_to_blame(autojump_clock: Clock) -> None:
    poison = 7

    def script(step: int, plan: wire.Plan) -> None:
        for opened in plan.opened:
            if wire.ints(opened.tokens)[0] == poison:
                raise StepFails("can't compute this", slot=opened.slot)

    async with open_fake_engine(lambda: FakeWorker(step_time=0.1, script=script)) as engine:
        results: list[int] = []

        async def good() -> None:
            results.append(len((await engine.complete([1, 2], max_tokens=30)).token_ids))

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(good)
            await trio.sleep(0.5)
            with pytest.raises(EngineError, match="can't compute this"):
                await engine.complete([poison, 2], max_tokens=30)
        assert results == [30, 30, 30]
        assert engine.statistics().worker_restarts == 0
        await settle(engine)


async def test_calls_reach_the_worker(autojump_clock: Clock) -> None:
    worker = FakeWorker(calls={"double": lambda value: value * 2})
    async with open_fake_engine(lambda: worker) as engine:
        assert await engine.call_worker("double", 21) == 42
        with pytest.raises(EngineError, match="nothing"):
            await engine.call_worker("nothing")


async def test_a_request_counts_once_on_its_way_into_the_queue(autojump_clock: Clock) -> None:
    counts: list[int] = []
    async with open_fake_engine() as engine:

        async def enter() -> None:
            async with engine.generate("hello", max_tokens=2):
                pass

        async def count() -> None:
            while engine.statistics().num_streams:
                statistics = engine.statistics()
                counts.append(statistics.num_tokenizing + statistics.scheduler.num_waiting)
                await trio.lowlevel.checkpoint()

        for _ in range(20):  # trio runs what is ready in a random order
            async with trio.open_nursery() as nursery:
                nursery.start_soon(enter)
                await trio.lowlevel.checkpoint()
                nursery.start_soon(count)
        assert max(counts) == 1
        await settle(engine)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("priority", "x"),
        ("priority", None),
        ("cache_salt", ["x"]),
        ("cache_salt", None),
        ("request_id", 5),
        ("timeout", -1),
        ("timeout", float("nan")),
        ("timeout", "1"),
        ("stop", 5),
        ("stop_token_ids", 5),
        ("logit_bias", {1.5: 1.0}),
        ("prompt", None),
        ("prompt", b"bytes"),
        ("prompt", {"role": "user"}),
    ],
)
async def test_an_argument_of_a_wrong_type_is_refused_by_name_and_harms_nobody(
    autojump_clock: Clock, name: str, value: object
) -> None:
    async with open_fake_engine(scheduling_policy="priority", max_num_seqs=1) as engine:
        arguments: dict[str, Any] = {"prompt": "hello", "max_tokens": 3, name: value}
        prompt = arguments.pop("prompt")
        async with engine.generate("another", max_tokens=50), engine.generate("a", max_tokens=5):
            with pytest.raises(InvalidRequest) as caught:
                await engine.complete(prompt, **arguments)
            assert caught.value.param == name
            await engine.complete("still here", max_tokens=1)
        await settle(engine)


@pytest.mark.parametrize(
    "make",
    [
        lambda: TextPrompt(5),  # type: ignore[arg-type]
        lambda: TokensPrompt((1.5,)),  # type: ignore[arg-type]
        lambda: TokensPrompt(5),  # type: ignore[arg-type]
        lambda: ChatPrompt(messages=5),  # type: ignore[arg-type]
        lambda: ChatPrompt(messages=({"role": "user"},), template_arguments=None),  # type: ignore[arg-type]
    ],
)
def test_a_prompt_of_a_wrong_type_is_never_made(make: Callable[[], object]) -> None:
    with pytest.raises(InvalidRequest, match="must be"):
        make()


class Integer(int):
    """An integer of another type, as an enumeration's members are."""


@pytest.mark.parametrize(
    "params",
    [
        {name: np.float64(0.5)}
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "frequency_penalty",
            "presence_penalty",
        )
    ]
    + [{name: Integer(2)} for name in ("top_k", "min_tokens", "logprobs", "seed")]
    + [{name: [Integer(200)]} for name in ("stop_token_ids", "allowed_token_ids")]
    + [
        {"logit_bias": {Integer(5): np.float64(1)}},
        {"prompt_logprobs": Integer(1)},
        {"repetition_penalty": 2**70},
    ],
    ids=str,
)
async def test_numbers_of_other_types_are_numbers(
    autojump_clock: Clock, params: dict[str, Any]
) -> None:
    """They pass every check, and then are to travel to the worker."""
    async with open_fake_engine() as engine:
        await engine.complete([1, 2, 3], max_tokens=2, **params)
        assert engine.healthy
