"""What being watched costs: the script measures both, and the table compares within a round."""

from __future__ import annotations

import pytest
import trio

from bench import live
from bench.live import UNWATCHED, Cost, Rate, measure_cost, measure_rate, tables
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import open_fake_engine


async def test_the_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "PROMPT_TOKENS", 5)
    monkeypatch.setattr(live, "OUTPUT_TOKENS", 4)
    async with open_fake_engine(lambda: FakeWorker(step_time=0.001)) as engine:
        with trio.fail_after(60):
            cost = await measure_cost(engine, 3, pictures=2)
            await engine.wait_idle()
            rates = [
                await measure_rate(engine, interval, streams=2, round=1)
                for interval in (UNWATCHED, 0.1)
            ]
    assert cost.requests == 3
    assert min(cost.take_us, cost.encode_us, cost.size) > 0
    assert [(rate.interval, rate.round) for rate in rates] == [(UNWATCHED, 1), (0.1, 1)]
    assert all(rate.tokens_per_second > 0 for rate in rates)
    assert not live.live.subject_of(engine).departures.is_wanted


def test_the_tables_compare_within_a_round() -> None:
    def ran(interval: float, round: int, rate: float) -> Rate:
        return Rate(
            interval=interval, round=round, tokens_per_second=rate, cpu_us_per_token=rate / 10
        )

    text = tables(
        [Cost(requests=1000, take_us=12.3, encode_us=4.5, size=2048)],
        [ran(0.0, 0, 100), ran(0.5, 0, 90), ran(0.0, 1, 200), ran(0.5, 1, 190)],
    )
    assert "| 1,000 | 12 | 4 | 2 |" in text
    assert "| nobody | 150 | 1.000 | 15.0 |" in text
    assert "| each 0.5 s | 140 | 0.925 | 14.0 |" in text
