"""What the benchmark of embeddings measures, and what its table says."""

from __future__ import annotations

from bench.embeddings import Measurement, make_texts, measure, table
from trioserve.testing.fake_engine import open_fake_encoder


async def test_a_measurement() -> None:
    texts = make_texts(12, 1)
    assert texts == make_texts(12, 1)
    assert all(5 <= len(text.split()) <= 40 for text in texts)
    async with open_fake_encoder() as engine:
        found = await measure(engine, texts, way="a", concurrency=3, round=2)
    assert (found.way, found.concurrency, found.round) == ("a", 3, 2)
    assert found.texts_per_second > 0
    assert 0 < found.p50 <= found.p99


def test_the_table_has_medians() -> None:
    def took(way: str, concurrency: int, rate: float) -> Measurement:
        return Measurement(
            way=way, concurrency=concurrency, round=0, texts_per_second=rate, p50=0.001, p99=0.002
        )

    rows = table([took("a", 1, 10.0), took("a", 1, 30.0), took("a", 1, 20.0)])
    assert rows.splitlines()[-1] == "| a | 1 | 20 | 1.0 · 2.0 |"
    peer = Measurement(way="b", concurrency=0, round=0, texts_per_second=5.0)
    assert table([peer]).splitlines()[-1] == "| b | all | 5 |  |"
