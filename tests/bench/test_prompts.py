"""The benchmarks of shared prefixes and long prompts, on engines without a model."""

from __future__ import annotations

import attrs
import pytest
from trio.testing import MockClock

from bench import long_prompts, shared_prefix_engine
from bench.long_prompts import Setting, gaps_within
from bench.shared_prefix_engine import Load
from trioserve.protocol import wire
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import open_fake_engine

LOAD = Load(prefix=100, own=8, output=4, requests=6, at_a_time=3)
FULL = 96
"""Of the prefix, in pages of 16."""


@pytest.mark.parametrize("shares", [True, False])
async def test_what_is_computed_of_a_shared_prefix(autojump_clock: MockClock, shares: bool) -> None:
    async with open_fake_engine(
        lambda: FakeWorker(step_time=0.01), enable_prefix_caching=shares
    ) as engine:
        found = [
            await shared_prefix_engine.measure(engine, LOAD, shares=shares, round=number)
            for number in range(2)
        ]
    alone = LOAD.prefix + LOAD.own
    computed = FULL + LOAD.requests * (alone - FULL) if shares else LOAD.requests * alone
    assert [m.prompt_tokens_computed for m in found] == [computed] * 2
    assert found[0].prompt_tokens == LOAD.requests * alone


def test_the_table_has_the_ratios_of_each_round() -> None:
    one = shared_prefix_engine.Measurement(
        shares=True,
        round=0,
        prompt_tokens=1000,
        prompt_tokens_computed=100,
        ttft_p50=0.1,
        ttft_p99=0.2,
        tokens_per_second=90.0,
    )
    other = attrs.evolve(
        one, shares=False, prompt_tokens_computed=1000, ttft_p50=0.4, tokens_per_second=30.0
    )
    lines = shared_prefix_engine.table([one, other]).splitlines()
    assert lines[-3:] == [
        "| shared | 1,000 | 100 | 100 · 200 | 90.0 |",
        "| computed by each | 1,000 | 1,000 | 400 · 200 | 30.0 |",
        "| ratio |  |  | 0.25 | 3.00 |",
    ]


def seconds_of(plan: wire.Plan) -> float:
    """Ten milliseconds a token."""
    return 1e-2 * int(wire.ints(plan.row_counts).sum())


async def test_gaps_while_a_long_prompt_is_computed(autojump_clock: MockClock) -> None:
    worker = FakeWorker(step_time=seconds_of, num_pages=1024, max_num_batched_tokens=96)
    async with open_fake_engine(lambda: worker) as engine:
        setting = Setting(budget=96, plans=1)
        calm, busy = await long_prompts.measure(engine, setting, [640], streams=4, round=0)
    assert (calm.length, busy.length) == (0, 640)
    assert calm.gap_p50 == pytest.approx(0.04)
    # A sixth of the budget is for prompts where others decode.
    assert busy.gap_p50 == pytest.approx(0.20)
    assert busy.ttft == pytest.approx(40 * 0.20, rel=0.1)
    assert f"| 96 | 1 | 640 | {busy.ttft:.2f} |" in long_prompts.table([calm, busy])


def test_gaps_are_counted_where_they_end() -> None:
    times = [[0.0, 1.0, 2.5], [], [2.0], [0.5, 3.0]]
    assert gaps_within(times, 0.5, 2.5) == [1.0, 1.5]
    assert gaps_within(times, 3.0, 9.0) == []
