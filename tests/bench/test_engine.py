"""The scripts of single parts of the engine measure what they say, on engines without a model."""

from __future__ import annotations

import math
import shutil

import numpy as np
import pytest
from trio.testing import MockClock

from bench.engine import (
    accuracy,
    embeddings,
    experts,
    long_prompts,
    offloading,
    products,
)
from gpu.cpu.build import LibraryBuildError
from gpu.cpu.library import load_library
from trioserve.protocol import wire
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import open_fake_encoder, open_fake_engine

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


def test_what_a_format_costs_is_as_worked_out_by_hand() -> None:
    reference = np.log([0.5, 0.25]), np.array([1, 2])
    reading = np.log([0.25, 0.25]), np.array([1, 3])
    found = accuracy.compare(reading, reference)
    assert found == pytest.approx((4.0, math.log(2) / 2, 0.5))


async def test_a_window_gives_one_figure_for_every_token_but_its_first() -> None:
    windows = [[1, 504, 338, 253, 3575], [1, 1008, 28, 216, 33]]
    reading = await accuracy.read(accuracy.FORMATS["float32"], windows)
    logprobs, choices = reading
    assert len(logprobs) == len(choices) == 8
    assert (logprobs < 0).all()
    assert accuracy.compare(reading, reading)[1:] == (0.0, 0.0)


async def test_embeddings_are_timed() -> None:
    texts = embeddings.make_texts(12, 1)
    assert texts == embeddings.make_texts(12, 1)
    assert all(5 <= len(text.split()) <= 40 for text in texts)
    async with open_fake_encoder() as engine:
        found = await embeddings.measure(engine, texts, 3)
    assert found["rate"] > 0
    assert 0 < found["p50"] <= found["p99"]


@pytest.mark.parametrize("name", experts.MODELS)
def test_every_way_computes_every_step_of_experts(name: str) -> None:
    try:
        load_library()
    except LibraryBuildError as error:
        pytest.skip(f"no compiled kernels: {error}")
    tiny = {
        **{"vocab_size": 300, "num_hidden_layers": 2, "hidden_size": 64, "head_dim": 32},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64},
        **{"num_experts_per_tok": 2, "num_local_experts": 4, "moe_intermediate_size": 32},
    }
    steps = {"two": (2, 1), "prompt": (1, 20)}
    found = experts.measure(name, tiny, threads=1, seconds=0, steps=steps)
    assert found.keys() == steps.keys()
    for times in found.values():
        assert times.keys() == {"bf16", "int8", "grouped_mm", "eager"}
        assert min(times.values()) > 0


LOAD = offloading.Load(length=64, turn=16, output=2, conversations=4, fit=2)


@pytest.mark.parametrize(
    ("kind", "found"), list(zip(offloading.KINDS, (0.15, 0.8, 0.8), strict=True))
)
async def test_a_turn_that_comes_back(kind: str, found: float, autojump_clock: object) -> None:
    """All but the new turn is found where everything was kept, little where it wasn't."""
    options = offloading.options_of(kind, LOAD)
    offloads = "kv_offloading_bytes" in options
    sizes = {"num_pages": options["num_gpu_blocks_override"], "page_size": offloading.PAGE_SIZE}
    sizes["num_host_pages"] = 200 if offloads else 0
    async with open_fake_engine(lambda: FakeWorker(step_time=0.01, **sizes)) as engine:
        measured = await offloading.measure(engine, LOAD, 0)
        assert measured["cached"] == pytest.approx(found)
        assert measured["p50"] > 0
        assert (engine.statistics().scheduler.pages_onloaded > 0) == offloads


def seconds_of(plan: wire.Plan) -> float:
    """Return ten milliseconds a token."""
    return 1e-2 * int(wire.ints(plan.row_counts).sum())


async def test_gaps_while_a_long_prompt_is_computed(autojump_clock: MockClock) -> None:
    worker = FakeWorker(step_time=seconds_of, num_pages=1024, max_num_batched_tokens=96)
    async with open_fake_engine(lambda: worker) as engine:
        calm, one, two = await long_prompts.measure(engine, [(1, 640), (2, 640)], 4, "seed")
    assert (calm[0], one[0], two[0]) == ((0, 0), (1, 640), (2, 640))
    assert sorted(calm[2])[len(calm[2]) // 2] == pytest.approx(0.04)
    # A prompt may double the gaps, and takes twice as long as by itself.
    assert sorted(one[2])[len(one[2]) // 2] == pytest.approx(0.08, rel=0.15)
    assert one[1] == pytest.approx(2 * 6.4, rel=0.15)
    # Two of them are delayed more, and get more.
    assert sorted(two[2])[len(two[2]) // 2] == pytest.approx(0.04 * (1 + 2 ** (2 / 3)), rel=0.15)
    assert 2 * 6.4 < two[1] < 2 * one[1]


def test_products_beside_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "SHAPES", [(64, 576), (32, 1536)])
    made = products.measure(rows=(1, 3), rounds=1)
    heads, _, one, two, _, note = made.table.splitlines()
    assert heads.startswith("| rows | oneDNN bf16, GFLOP/s | bf16, GFLOP/s | q8_0, GFLOP/s |")
    assert one.startswith("| 1 |")
    assert two.startswith("| 3 |")
    assert note.startswith("One row reads the weights in bf16 at ")
    assert [each["bound"] for each in made.facts["verdicts"]] == [1.2, 1.2]


def test_gaps_are_counted_where_they_end() -> None:
    times = [[0.0, 1.0, 2.5], [], [2.0], [0.5, 3.0]]
    assert long_prompts.gaps_within(times, 0.5, 2.5) == [1.0, 1.5]
    assert long_prompts.gaps_within(times, 3.0, 9.0) == []
