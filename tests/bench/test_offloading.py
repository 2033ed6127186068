"""What the benchmark of offloading measures, and what its table says."""

from __future__ import annotations

import pytest

from bench.offloading import KINDS, PAGE_SIZE, Load, Measurement, measure, options_of, table
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import open_fake_engine

LOAD = Load(length=64, turn=16, output=2, conversations=4, fit=2)


@pytest.mark.parametrize(("kind", "found"), list(zip(KINDS, (0.15, 0.8, 0.8), strict=True)))
async def test_a_turn_that_comes_back(kind: str, found: float, autojump_clock: object) -> None:
    """All but the new turn is found where everything was kept, little where it wasn't."""
    num_pages = options_of(kind, LOAD)["num_gpu_blocks_override"]
    offloads = "kv_offloading_bytes" in options_of(kind, LOAD)

    def make() -> FakeWorker:
        return FakeWorker(
            num_pages=num_pages,
            num_host_pages=200 if offloads else 0,
            page_size=PAGE_SIZE,
            step_time=0.01,
        )

    async with open_fake_engine(make) as engine:
        measured = await measure(engine, LOAD, kind=kind, round=0)
        assert measured.share_cached == pytest.approx(found)
        assert measured.ttft_p50 > 0
        assert (engine.statistics().scheduler.pages_onloaded > 0) == offloads


def test_the_table_compares_with_computing_again() -> None:
    measurements = [
        Measurement(kind=kind, round=round, ttft_p50=wait, ttft_p99=2 * wait, share_cached=share)
        for round in range(2)
        for kind, wait, share in zip(KINDS, (0.2, 0.05, 0.04), (0.0, 0.96, 0.97), strict=True)
    ]
    lines = table(measurements).splitlines()
    assert lines[2] == "| computed again | 0% | 200.0 · 400.0 | 1.000 |"
    assert lines[3] == "| copied back | 96% | 50.0 · 100.0 | 0.250 |"
    assert lines[4] == "| all in the cache | 97% | 40.0 · 80.0 | 0.200 |"
