"""Kernels that wait otherwise: what they are compiled with, and what the table says of them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import trio

from bench import waiting
from bench.waiting import Measurement, compiled_with, measure, table
from tests.support.engines import open_tiny_engine
from tests.support.tiny_models import make_tiny

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


@needs_compiler
def test_the_number_reaches_the_kernels_source(tmp_path: Path) -> None:
    before = dict(os.environ)
    source = Path(__file__).parents[2] / "gpu" / "cpu" / "csrc" / "team.h"
    with compiled_with(17, tmp_path):
        read = subprocess.run(
            [os.environ["CXX"], "-std=c++20", "-mavx512f", "-E", "-x", "c++", str(source)],
            capture_output=True,
            text=True,
            check=True,
        )
        assert os.environ["XDG_CACHE_HOME"].startswith(str(tmp_path))
    assert "kSpins = 17;" in read.stdout
    assert dict(os.environ) == before


async def test_a_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "PROMPT_TOKENS", 5)
    monkeypatch.setattr(waiting, "OUTPUT_TOKENS", 4)
    async with open_tiny_engine(make_tiny("smollm2", tmp_path)) as engine:
        with trio.fail_after(60):
            found = await measure(engine, spins=3, streams=2, round=1)
    assert (found.spins, found.streams, found.round) == (3, 2, 1)
    assert found.tokens_per_second > 0
    assert 0 <= found.gap_p50 <= found.gap_p99


def test_the_table_has_medians() -> None:
    def took(spins: int, round: int, rate: float) -> Measurement:
        return Measurement(
            spins=spins,
            streams=8,
            round=round,
            tokens_per_second=rate,
            gap_p50=rate / 1e5,
            gap_p99=rate / 1e4,
        )

    rows = table(
        [took(2000, 0, 100.0), took(0, 0, 50.0), took(2000, 1, 300.0), took(2000, 2, 200.0)]
    )
    assert "| 0 | 8 | 50.0 | 0.5 · 5.0 |" in rows
    assert "| 2,000 | 8 | 200.0 | 2.0 · 20.0 |" in rows
