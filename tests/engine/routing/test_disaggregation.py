"""Prefill and decode on different workers: the same tokens, and no request is lost."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from tests.support.known_answers import (
    answer_to,
    faults_by_chance,
    next_token,
    prompt,
    step_time,
)
from trioserve import Engine, EngineConfig
from trioserve.engine.worker_making import check_role
from trioserve.engine.worker_start import start_message
from trioserve.protocol import wire
from trioserve.protocol.errors import EngineError, InvalidRequest
from trioserve.scheduler.sequence_state import SequenceState
from trioserve.testing import FakeWorker
from trioserve.testing.fake_disk import FakeDisk
from trioserve.testing.fake_engine import open_fake_engine

Clock = trio.testing.MockClock
PAGE = 4
SMALL: dict[str, Any] = {"num_pages": 40, "num_host_pages": 40, "page_size": PAGE}
APART: dict[str, Any] = {"data_parallel_size": 2, "disaggregation": ("prefill", "decode")}


def workers(**options: Any) -> Callable[[], FakeWorker]:
    disk = FakeDisk()
    defaults = {**SMALL, "step_time": step_time, "token": next_token}
    return lambda: FakeWorker(disk=disk, **{**defaults, **options})


async def ask(engine: Engine, number: int, count: int = 8, **options: Any) -> None:
    completion = await engine.complete(prompt(number), max_tokens=count, **options)
    assert list(completion.token_ids) == answer_to(prompt(number), count)


def tokens_computed(engine: Engine) -> list[tuple[int, int]]:
    """Return the tokens of prompts, and those of outputs, that each worker has computed."""
    counted = [each.statistics() for each in engine.schedulers]
    return [
        (each.num_prefill_tokens, each.num_tokens_computed - each.num_prefill_tokens)
        for each in counted
    ]


async def test_one_worker_computes_prompts_and_the_other_outputs(autojump_clock: Clock) -> None:
    async with open_fake_engine(workers(), **APART) as engine:
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(ask, engine, number)
        # The last page isn't full: its tokens are computed again.
        (prompts, outputs), (again, decoded) = tokens_computed(engine)
        assert (prompts, outputs) == (4 * 22, 0)
        assert again == 4 * 3
        assert decoded == 4 * 6
        statistics = engine.statistics().scheduler
        assert statistics.num_handed_over == 4
        assert statistics.pages_imported == 4 * 5
        engine.check_integrity()


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("prefill", "decode", "decode")])
async def test_pages_go_ahead_of_the_last_chunk(
    autojump_clock: Clock, roles: tuple[str, ...]
) -> None:
    """A chunk's pages are fetched while the next one is computed, all by one worker."""

    def call_time(call: wire.Call) -> float:
        arguments = msgspec.msgpack.decode(call.arguments) if call.arguments else None
        return 0.002 * len(arguments["keys"]) if call.name.endswith("port_pages") else 0.0

    make = workers(max_num_batched_tokens=8, call_time=call_time)
    options: dict[str, Any] = {"data_parallel_size": len(roles), "disaggregation": roles}

    def imported(engine: Engine) -> int:
        return engine.statistics().scheduler.pages_imported

    async with open_fake_engine(make, **options) as engine:
        for length in (5, 8, 5, 8):  # Now the times of transfers are known.
            await engine.complete(prompt(length, length), max_tokens=3)
        before, at_first_token = imported(engine), None
        async with engine.generate(prompt(0), max_tokens=8) as chunks:
            async for _ in chunks:
                if at_first_token is None:
                    at_first_token = imported(engine) - before
        assert at_first_token == 2 * 8 // PAGE
        assert imported(engine) - before <= 22 // PAGE  # None came twice.
        engine.check_integrity()


async def test_every_chunk_goes_ahead_unless_the_first_token_is_the_last(
    autojump_clock: Clock,
) -> None:
    """The pages of the last chunk are asked for while it is computed, too."""
    planned: list[int] = []
    async with open_fake_engine(workers(max_num_batched_tokens=8), **APART) as engine:
        feeds = engine.schedulers[0].feeds
        send_ahead = feeds.on_chunk
        assert send_ahead is not None

        def on_chunk(seq_state: SequenceState) -> None:
            planned.append(seq_state.planned)
            send_ahead(seq_state)

        feeds.on_chunk = on_chunk
        await ask(engine, 0, 8)
        assert planned == [8, 16, 22]
        await ask(engine, 1, 1)
        assert len(planned) == 3
        assert engine.statistics().scheduler.pages_imported == 22 // PAGE
        engine.check_integrity()


async def test_no_prompt_waits_for_the_pages_of_another_one(autojump_clock: Clock) -> None:
    """Pages that would go ahead behind those of a slow worker are fetched as they are needed."""
    disk, made = FakeDisk(), list[FakeWorker]()

    def is_slow(worker: FakeWorker) -> bool:
        return any(slot.tokens[0] == prompt(0)[0] for slot in worker.slots.values())

    def make() -> FakeWorker:
        defaults = {**SMALL, "token": next_token, "max_num_batched_tokens": 8}
        worker = FakeWorker(
            disk=disk, step_time=lambda _: 10.0 if is_slow(worker) else 0.1, **defaults
        )
        made.append(worker)
        return worker

    roles = ("prefill", "prefill", "decode")
    options: dict[str, Any] = {"data_parallel_size": 3, "disaggregation": roles}
    async with open_fake_engine(make, routing_policy="round_robin", **options) as engine:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, engine, 0)
            await trio.sleep(1)
            began = trio.current_time()
            await ask(engine, 1)
            assert trio.current_time() - began < 3
            assert sum(map(is_slow, made)) == 1, "the other prompt is still computed"
        engine.check_integrity()


async def test_what_went_ahead_is_free_once_the_client_has_left(autojump_clock: Clock) -> None:
    make = workers(max_num_batched_tokens=8, call_time=0.3)
    async with open_fake_engine(make, **APART) as engine:
        for patience in (0.05, 0.2, 0.25, 0.35, 0.5, 0.6):
            with trio.move_on_after(patience) as scope:
                await ask(engine, round(100 * patience), 8)
            assert scope.cancelled_caught
            await trio.sleep(2)
            assert engine.statistics().scheduler.pages_held == 0
            engine.check_integrity()
        assert engine.statistics().scheduler.pages_imported > 0
        await ask(engine, 0)


async def test_a_single_token_is_not_handed_over(autojump_clock: Clock) -> None:
    async with open_fake_engine(workers(), **APART) as engine:
        await ask(engine, 0, 1)
        assert engine.statistics().scheduler.num_handed_over == 0
        engine.check_integrity()


async def test_several_outputs_move_together(autojump_clock: Clock) -> None:
    async with open_fake_engine(workers(), **APART) as engine:
        completion = await engine.complete(prompt(0), max_tokens=8, n=3)
        assert [list(each.token_ids) for each in completion.outputs] == [
            answer_to(prompt(0), 8)
        ] * 3
        assert engine.statistics().scheduler.num_handed_over == 1
        assert tokens_computed(engine)[0][1] == 0
        engine.check_integrity()


async def test_beams_are_computed_where_outputs_are(autojump_clock: Clock) -> None:
    async with open_fake_engine(workers(), **APART) as engine:
        await engine.complete(prompt(0), max_tokens=4, beam_width=2, n=2)
        assert tokens_computed(engine)[0] == (0, 0)
        engine.check_integrity()


async def test_outputs_go_on_if_no_worker_decodes(autojump_clock: Clock) -> None:
    """The worker for prompts computes all if the other one is lost for good."""
    make = workers()
    made = 0

    def one_of_two() -> FakeWorker:
        nonlocal made
        made += 1
        return make()

    async with open_fake_engine(one_of_two, **APART) as engine:
        decodes = engine.schedulers[1]
        with engine.schedulers.placement.retiring(decodes):
            await ask(engine, 0)
            assert engine.statistics().scheduler.num_handed_over == 0
        await ask(engine, 1)
        engine.check_integrity()


async def test_workers_that_are_added_have_roles(autojump_clock: Clock) -> None:
    async with open_fake_engine(workers(), kv_offloading_bytes=1 << 20) as engine:
        await ask(engine, 0)
        assert (await engine.add_worker(role="prefill")).role == "prefill"
        assert (await engine.add_worker(role="decode")).role == "decode"
        start = start_message(EngineConfig("m"), Path("/m"))
        loaded = [each.amend(start).hands_over for each in engine.worker_group]
        assert loaded == [False, True, True]
        await engine.remove_worker(0)
        assert engine.statistics().scheduler.num_handed_over == 0
        await ask(engine, 1)
        assert engine.statistics().scheduler.num_handed_over == 1
        await engine.add_worker()
        assert [each.role for each in engine.workers] == ["prefill", "decode", "both"]
        engine.check_integrity()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "the role decode needs pages that are handed over"),
        ({"data_parallel_size": 2, "disaggregation": ("auto",)}, "leave the role out"),
    ],
    ids=["no-host-pages", "auto"],
)
async def test_roles_that_can_not_be_are_refused_at_run_time(
    autojump_clock: Clock, options: dict[str, Any], message: str
) -> None:
    async with open_fake_engine(workers(), **options) as engine:
        count = len(engine.workers)
        with pytest.raises(InvalidRequest, match=message):
            await engine.add_worker(role="decode")
        assert len(engine.workers) == count


def test_a_worker_of_several_ranks_has_its_role_when_it_loads() -> None:
    """Only then it knows whether its pages leave it."""
    config = EngineConfig("m", tensor_parallel_size=2, kv_offloading_bytes=1 << 20)
    check_role(config, "decode")
    check_role(config, "both", loads_first=True)
    with pytest.raises(InvalidRequest, match="name roles when the engine starts"):
        check_role(config, "decode", loads_first=True)


async def test_a_long_prompt_holds_no_stream_up(autojump_clock: Clock) -> None:
    """Gaps between tokens stay what they are while prompts are computed elsewhere."""
    gaps: list[float] = []

    async def stream(engine: Engine) -> None:
        last: float | None = None
        async with engine.generate(prompt(0), max_tokens=60) as chunks:
            async for _ in chunks:
                now = trio.current_time()
                if last is not None:
                    gaps.append(now - last)
                last = now

    make = workers(num_pages=400, num_host_pages=400)
    async with open_fake_engine(make, **APART) as engine:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream, engine)
            await trio.sleep(1)
            for number in range(1, 4):
                nursery.start_soon(ask, engine, number)
        engine.check_integrity()
    # The first gap has the way to the other worker; later ones its steps of few tokens.
    assert max(gaps[1:]) <= 0.1 + 0.01 * 8


async def run_history(seed: int) -> None:
    numbers = random.Random(seed)

    make = workers(
        num_pages=numbers.choice((9, 12, 20, 60)),
        num_host_pages=numbers.choice((2, 6, 20, 60)),
        script=faults_by_chance(numbers),
        step_time=numbers.choice((0.0, 0.1, step_time)),
        call_time=lambda _: numbers.choice((0.0, 0.0, 0.05, 0.7)),
    )

    async def client(engine: Engine) -> None:
        for _ in range(12):
            tokens = prompt(numbers.randrange(6), numbers.randint(1, 30))
            count, n = numbers.randint(1, 6), numbers.choice((1, 1, 1, 2))
            with trio.move_on_after(numbers.choice((0.2, 1000.0))):
                try:
                    completion = await engine.complete(tokens, max_tokens=count, n=n)
                except EngineError:
                    continue
                for each in completion.outputs:
                    assert list(each.token_ids) == answer_to(tokens, count)
            if numbers.random() < 0.03:
                engine.flush_cache()

    roles = numbers.choice(
        [
            ("prefill", "decode"),
            ("prefill", "both"),
            ("prefill", "decode", "decode"),
            ("decode",),
            ("auto",),
        ]
    )
    options: dict[str, Any] = {
        "data_parallel_size": max(len(roles), 2),
        "disaggregation": roles,
        "max_plans_in_flight": numbers.choice((1, 2)),
    }
    async with open_fake_engine(make, max_worker_restarts=1000, **options) as engine:
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(client, engine)
        await trio.sleep(10)
        engine.check_integrity()
        for each in engine.schedulers:
            assert each.core is None or not each.core.leaving


@pytest.mark.parametrize("seed", range(40))
async def test_random_histories(autojump_clock: Clock, seed: int) -> None:
    await run_history(seed)
