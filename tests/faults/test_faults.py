"""Parts of the fault tests: each has to notice the fault that it looks for."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import threading
from collections import Counter
from typing import Any, cast

import attrs
import pytest
import torch
import trio

from gpu.sampling.sampler import Sampler
from gpu.sampling.sampler_io import SamplerRow
from tests.faults.answers import MARGIN, Difference, first_difference, is_near_tie
from tests.faults.damage import KINDS
from tests.faults.leftovers import Holdings, Leftovers, nothing_held, nothing_left
from tests.faults.load import mixture
from tests.faults.soak import Sample, Scenario, Soak, figures_of_soak, trend_of
from tests.faults.stage import Subject
from tests.faults.streams import Facts, Load
from tests.faults.worker_kills import line_through
from trioserve import Engine
from trioserve.protocol import wire
from trioserve.protocol.sampling import SamplerParams
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import open_fake_engine


class TestHoldings:
    """Each sort of leftover is noticed, and named."""

    async def test_nothing(self) -> None:
        before = await Holdings.now()
        await nothing_left(before, within=0.0)

    async def test_a_task(self) -> None:
        before = await Holdings.now()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever, name="forgotten")
            with pytest.raises(Leftovers, match=r"'tasks': \{'forgotten': 1\}"):
                await nothing_left(before, within=0.1)
            nursery.cancel_scope.cancel()
        await nothing_left(before)

    async def test_a_descriptor(self) -> None:
        before = await Holdings.now()
        ends = os.pipe()
        with pytest.raises(Leftovers, match=r"'descriptors': \{'pipe:"):
            await nothing_left(before, within=0.1)
        for end in ends:
            os.close(end)
        await nothing_left(before)

    async def test_a_thread(self) -> None:
        before = await Holdings.now()
        done = threading.Event()
        thread = threading.Thread(target=done.wait)
        thread.start()
        with pytest.raises(Leftovers, match="threads"):
            await nothing_left(before, within=0.1)
        done.set()
        thread.join()
        await nothing_left(before)

    async def test_a_process(self) -> None:
        before = await Holdings.now()
        process = await trio.lowlevel.open_process(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert process.stdin is not None
        async with process.stdin:
            with pytest.raises(Leftovers, match=r"'children': \{'python"):
                await nothing_left(before, sorts=["children"], within=0.1)
        await process.wait()
        await nothing_left(before)

    async def test_a_thread_that_trio_keeps_is_none(self) -> None:
        before = await Holdings.now()
        await trio.to_thread.run_sync(lambda: None)
        await nothing_left(before, sorts=["threads"], within=1.0)


async def test_what_an_engine_holds_is_noticed(autojump_clock: object) -> None:
    def make_worker() -> FakeWorker:
        worker = FakeWorker(step_time=0.1)
        worker.calls["statistics"] = lambda _: {"open_slots": len(worker.slots), "pages_used": 0}
        return worker

    async with open_fake_engine(make_worker) as engine:
        await nothing_held(engine)
        async with engine.generate("hello", max_tokens=1000) as stream:
            await stream.receive()
            with pytest.raises(Leftovers, match=r"'running': 1.*\"worker's slots\": 1"):
                await nothing_held(engine, within=1.0)
        await nothing_held(engine)


class TestLostWorkers:
    """An answer that isn't the undisturbed one is counted; prefills of any length are compared."""

    RIGHT = Facts([(1, 2, 3), (4,)], [("abc", "length", None), ("d", "stop", 2)], [-0.5, -0.25])

    @pytest.mark.parametrize(
        ("changed", "counts"),
        [
            ({}, (0, 0, 0)),
            ({"tokens": [(1, 2), (5,)]}, (2, 0, 0)),
            ({"tokens": [(1, 2, 3)]}, (1, 0, 0)),
            ({"ends": [("abc", "length", None), ("d", "abort", None)]}, (0, 1, 0)),
            ({"logprobs": [-0.5, math.nextafter(-0.25, 0)]}, (0, 0, 1)),
        ],
        ids=["right", "tokens", "an output", "an end", "a bit"],
    )
    def test_differences(self, changed: dict[str, Any], counts: tuple[int, ...]) -> None:
        load = Load(engine=cast(Engine, None), asked=[], clients=1)
        load.compare(self.RIGHT, attrs.evolve(self.RIGHT, **changed))
        assert (load.tokens_differing, load.ends_differing, load.logprobs_differing) == counts
        assert load.is_right == (not any(counts))
        assert (load.tokens_compared, load.logprobs_compared) == (4, 2)

    def test_a_few_late_prefills_move_no_line(self) -> None:
        points = [(count, 9.0 if count % 20 == 7 else 0.1 + 0.002 * count) for count in range(400)]
        line = line_through(points)
        assert line.intercept == pytest.approx(0.1, rel=0.05)
        assert line.slope == pytest.approx(0.002, rel=0.05)


class TestAnswers:
    """A difference is one of rounding, or it is real."""

    def test_where_two_answers_part(self) -> None:
        assert first_difference([1, 2, 3], [1, 2, 3]) is None
        assert first_difference([1, 2], [1, 5]) == Difference(position=1, expected=2, given=5)
        assert first_difference([1, 2], [1]) == Difference(position=1, expected=2, given=-1)

    @pytest.mark.parametrize(("gap", "near"), [(0.5 * MARGIN, True), (3 * MARGIN, False)])
    @pytest.mark.parametrize("other", [7, 500])
    def test_greedy(self, gap: float, near: bool, other: int) -> None:
        logits = torch.zeros(1000)
        logits[3], logits[other] = 5.0, 5.0 - gap
        difference = Difference(position=0, expected=3, given=other)
        greedy = SamplerParams(temperature=0.0)
        assert is_near_tie(logits, greedy, [1, 2], difference) == near

    def test_a_missing_token_is_no_matter_of_rounding(self) -> None:
        difference = Difference(position=0, expected=3, given=-1)
        assert not is_near_tie(torch.zeros(10), SamplerParams(), [1], difference)

    def test_sampled(self) -> None:
        """Logits are moved until the same random numbers give another token: right there, the two
        are near; a little further on, or against a third token, they are not."""
        generator = torch.Generator().manual_seed(0)
        params = SamplerParams(temperature=0.8, seed=5)
        logits = 2 * torch.randn(1000, generator=generator)
        base = _drawn(logits, params)
        # What comes out once the first choice is made less and less likely.
        low, high = 0.0, 50.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (
                (middle, high)
                if _drawn(_less(logits, base, middle), params) == base
                else (
                    low,
                    middle,
                )
            )
        turning = _less(logits, base, high)
        other = _drawn(turning, params)
        assert other != base
        near = Difference(position=0, expected=base, given=other)
        assert is_near_tie(turning, params, [1, 2, 3], near)
        assert not is_near_tie(logits, params, [1, 2, 3], near)
        third = Difference(position=0, expected=base, given=(other + 1) % 1000)
        assert not is_near_tie(turning, params, [1, 2, 3], third)


def _less(logits: torch.Tensor, token: int, amount: float) -> torch.Tensor:
    moved = logits.clone()
    first = token // 128 * 128
    moved[first : first + 128] -= amount
    return moved


def _drawn(logits: torch.Tensor, params: SamplerParams) -> int:
    row = SamplerRow(params, [1, 2, 3], 3)
    return int(Sampler(len(logits), "cpu").sample(logits[None].clone(), [row]).tokens[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_arrives_damaged(kind: str) -> None:
    message = wire.encode(wire.Call(number=7, name="x" * 100))
    arrived = KINDS[kind](message, random.Random(0))
    assert arrived != [message]
    if kind == "truncated":
        assert message.startswith(arrived[0])


def test_a_mixture_is_of_all_kinds_and_repeats_with_its_seed() -> None:
    def some(seed: int) -> list[dict[str, object]]:
        bodies = mixture(random.Random(seed), longest_prompt=50, longest_output=20)
        return [next(bodies) for _ in range(200)]

    fields = {name for body in some(0) for name in body}
    assert {"n", "stop", "logprobs", "response_format", "structured_outputs", "seed"} <= fields
    assert some(0) == some(0) != some(1)


class TestTrend:
    def test_growth_is_found_in_noise(self) -> None:
        numbers = random.Random(0)
        points = [(float(t), 100 + 0.5 * t + numbers.gauss(0, 1)) for t in range(200)]
        trend = trend_of(points)
        assert trend.slope == pytest.approx(0.5, abs=4 * trend.error)
        assert 0 < trend.error < 0.01

    def test_each_life_has_a_level_of_its_own(self) -> None:
        lives = [[(float(t), level + 2.0 * t) for t in range(5)] for level in (0, 1000, -50)]
        trend = trend_of(*lives)
        assert trend.slope == pytest.approx(2.0)
        assert trend.points == 15
        assert trend.error == pytest.approx(0.0, abs=1e-6)

    def test_too_few_points(self) -> None:
        assert math.isnan(trend_of([(0.0, 1.0)], []).slope)


class TestSoak:
    """Two workers, each of which grows while it is young; the verdict is on what comes after."""

    def figures(
        self,
        *,
        server: float = 0.0,
        worker: float = 0.0,
        after: int = 20,
        seconds: float = 3600.0,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return those of a run in which the processes grow by so many MiB an hour."""
        run = Soak(scenario=Scenario(seconds=seconds), subject=cast(Subject, None))
        for time in range(0, 3600, 5):
            pid, age = (1, time) if time < 1800 else (2, time - 1800)
            grown = 1 - math.exp(-age / 60) + worker * time / 3600
            run.samples.append(
                Sample(
                    time=float(time),
                    server_bytes=(100 << 20) + round(server * time / 3600 * (1 << 20)),
                    worker=pid,
                    worker_bytes=(700 << 20) + round(grown * (1 << 20)),
                )
            )
        return figures_of_soak(run, Counter(), (20, after))

    def test_flat(self) -> None:
        figures, facts = self.figures()
        assert facts["passed"]
        assert float(figures["worker's growth, MiB/h"].split()[0]) == pytest.approx(0, abs=0.1)

    @pytest.mark.parametrize(
        "bad", [{"server": 40.0}, {"worker": 100.0}, {"after": 40}], ids=lambda bad: next(iter(bad))
    )
    def test_growth(self, bad: dict[str, Any]) -> None:
        assert not self.figures(**bad)[1]["passed"]

    def test_a_lost_request(self) -> None:
        run = Soak(scenario=Scenario(), subject=cast(Subject, None), lost=Counter({"HTTP 500": 1}))
        run.samples.append(Sample(time=0.0, server_bytes=0, worker=None, worker_bytes=0))
        assert not figures_of_soak(run, Counter(), (0, 0))[1]["passed"]

    def test_a_short_run_says_nothing_of_memory(self) -> None:
        figures, facts = self.figures(worker=1000.0, seconds=600.0)
        assert facts["flat"] == {"server": None, "worker": None}
        assert figures["memory"] == "too short a run to tell"
