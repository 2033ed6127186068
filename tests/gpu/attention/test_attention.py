"""The CPU's paged attention against a loop in float64, and the rotary tables."""

from __future__ import annotations

import math
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gpu.attention import CacheShape, StepLayout
from gpu.attention.torch_cpu import TorchCpuAttention, split_buckets
from gpu.models.rope import cos_sin_table, inverse_frequencies
from tests.support.rounding import apart
from trioserve.model_files.config import ModelConfig, RopeScaling
from trioserve.protocol.errors import ModelLoadError

CPU = torch.device("cpu")


class Harness:
    """Sequences of random queries, keys and values, computed in steps of any cut.

    Pages are handed out in a random order, so that a mistaken page shows.
    """

    def __init__(
        self,
        *,
        page_size: int,
        kv_heads: int,
        group: int,
        head_dim: int,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        windows: tuple[int | None, ...] = (None,),
        num_pages: int = 64,
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.heads = kv_heads * group
        self.shape = CacheShape(
            num_layers=2,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            device=CPU,
        )
        angles = torch.rand(256, head_dim // 2, generator=self.generator) * 7
        self.table = torch.cat([angles.cos(), angles.sin()], dim=-1)
        self.windows = windows
        self.attention = TorchCpuAttention(self.shape, self.heads, self.table, windows)
        self.free = torch.randperm(num_pages, generator=self.generator).tolist()
        self.qkv: list[torch.Tensor] = []  # per sequence [tokens, heads + 2 * kv_heads, head_dim]
        self.pages: list[list[int]] = []
        self.computed: list[int] = []

    def add(self, length: int) -> int:
        """Return a new sequence of ``length`` tokens; returns its number."""
        size = (length, self.heads + 2 * self.shape.num_kv_heads, self.shape.head_dim)
        self.qkv.append(torch.randn(size, generator=self.generator).to(self.shape.dtype))
        self.pages.append([self.free.pop() for _ in range(-(-length // self.shape.page_size))])
        self.computed.append(0)
        return len(self.qkv) - 1

    def step(
        self,
        rows: dict[int, int],
        layer: int = 1,
        rotate: bool = True,
    ) -> dict[int | None, dict[int, torch.Tensor]]:
        """Compute the next ``rows[i]`` tokens of sequence i; window -> sequence -> its output."""
        ends = {i: self.computed[i] + count for i, count in rows.items()}
        order = sorted(rows, key=lambda i: (rows[i] > 1, -ends[i]))
        width = max(len(self.pages[i]) for i in order)
        tables = np.zeros((len(order), width), dtype=np.int32)
        for row, i in enumerate(order):
            tables[row, : len(self.pages[i])] = self.pages[i]
        starts = np.cumsum([0, *(rows[i] for i in order)])
        layout = StepLayout(
            positions=np.concatenate([np.arange(self.computed[i], ends[i]) for i in order]),
            query_start=starts,
            context_lens=np.array([ends[i] for i in order]),
            slots=np.array(order),
            block_tables=tables,
            num_decode_rows=sum(rows[i] == 1 for i in order),
        )
        self.attention.begin(layout)
        qkv = torch.cat([self.qkv[i][self.computed[i] : ends[i]] for i in order])
        q = self.attention.rope_and_write(layer, qkv, rotate)
        results = {}
        for window in self.windows:
            out = self.attention.attend(layer, q, window)
            results[window] = {i: out[starts[r] : starts[r + 1]] for r, i in enumerate(order)}
        self.computed = [ends.get(i, done) for i, done in enumerate(self.computed)]
        return results

    def reference(
        self, i: int, start: int, end: int, window: int | None, rotate: bool = True
    ) -> torch.Tensor:
        """Queries ``start`` to ``end - 1`` of sequence i, one key after the other, in float64."""
        kv_heads, half = self.shape.num_kv_heads, self.shape.head_dim // 2
        group = self.heads // kv_heads
        qkv = self.qkv[i][:end].double()
        if rotate:
            cos, sin = self.table[:end].double()[:, None].chunk(2, dim=-1)
            turned = qkv[:, : self.heads + kv_heads]
            a, b = turned[..., :half], turned[..., half:]
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
            qkv = torch.cat([turned, qkv[:, self.heads + kv_heads :]], dim=1)
        out = torch.zeros(end - start, self.heads, 2 * half, dtype=torch.float64)
        for position in range(start, end):
            oldest = 0 if window is None else max(0, position - window + 1)
            for head in range(self.heads):
                keys = qkv[oldest : position + 1, self.heads + head // group]
                values = qkv[oldest : position + 1, self.heads + kv_heads + head // group]
                weights = (keys @ qkv[position, head] / math.sqrt(2 * half)).softmax(0)
                out[position - start, head] = weights @ values
        return out

    def check(self, rows: dict[int, int], rotate: bool = True) -> None:
        starts = {i: self.computed[i] for i in rows}
        for window, outputs in self.step(rows, rotate=rotate).items():
            for i, out in outputs.items():
                wanted = self.reference(i, starts[i], starts[i] + rows[i], window, rotate)
                assert out.is_contiguous()
                # Rotation, scores, softmax and the weighed sum; the cache rounds keys and values.
                terms = 2 * self.shape.head_dim + 2 * (starts[i] + rows[i])
                bound = apart(terms, wanted) + apart(4, wanted, self.shape.dtype)
                torch.testing.assert_close(out.double(), wanted, rtol=0, atol=bound)


def test_prefill_then_decode() -> None:
    harness = Harness(page_size=4, kv_heads=2, group=3, head_dim=8)
    i = harness.add(12)
    harness.check({i: 9})
    for _ in range(3):
        harness.check({i: 1})


def test_chunks_equal_one_prefill() -> None:
    harness = Harness(page_size=4, kv_heads=1, group=2, head_dim=8, windows=(None, 5))
    i = harness.add(20)
    for count in (3, 7, 1, 9):
        harness.check({i: count})


def test_ragged_decode_beside_prefill() -> None:
    harness = Harness(page_size=4, kv_heads=2, group=2, head_dim=8, windows=(3, None, 16))
    for length in (2, 9, 30, 17, 18, 18):
        i = harness.add(length)
        harness.step({i: length - 1})
    fresh = harness.add(6)
    harness.check({**dict.fromkeys(range(6), 1), fresh: 6})


def test_no_rotation() -> None:
    harness = Harness(page_size=2, kv_heads=2, group=1, head_dim=4)
    i = harness.add(5)
    harness.check({i: 4}, rotate=False)
    harness.check({i: 1}, rotate=False)


def test_layers_do_not_share_their_cache() -> None:
    harness = Harness(page_size=4, kv_heads=1, group=1, head_dim=8)
    i = harness.add(8)
    harness.step({i: 7}, layer=1)
    harness.computed[i], keep = 0, harness.qkv[i]
    harness.qkv[i] = keep.neg()
    harness.step({i: 7}, layer=0)
    harness.qkv[i] = keep
    harness.check({i: 1})


def test_bfloat16_is_near() -> None:
    harness = Harness(page_size=4, kv_heads=2, group=2, head_dim=16, dtype=torch.bfloat16)
    for length in (5, 14, 30):
        i = harness.add(length)
        harness.check({i: length - 1})
    harness.check({0: 1, 1: 1, 2: 1})


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_mix_of_rows(data: st.DataObject) -> None:
    windows = data.draw(st.sampled_from([(None,), (4,), (None, 1), (7, None)]))
    harness = Harness(
        page_size=data.draw(st.sampled_from([1, 2, 5, 16])),
        kv_heads=data.draw(st.integers(1, 3)),
        group=data.draw(st.integers(1, 3)),
        head_dim=data.draw(st.sampled_from([4, 6])),
        windows=windows,
        seed=data.draw(st.integers(0, 99)),
        num_pages=80,
    )
    for length in data.draw(st.lists(st.integers(1, 16), min_size=1, max_size=5)):
        harness.add(length)
    while True:
        left = {i: len(qkv) - harness.computed[i] for i, qkv in enumerate(harness.qkv)}
        counts = {i: data.draw(st.integers(1, n)) for i, n in left.items() if n}
        if not counts:
            break
        harness.check(counts)


@given(
    lengths=st.lists(st.integers(1, 500), max_size=40),
    cost=st.integers(0, 400),
    limit=st.integers(1, 5000),
)
def test_buckets_cover_rows_within_the_limit(lengths: list[int], cost: int, limit: int) -> None:
    buckets = split_buckets(np.array(lengths, dtype=np.int64), cost, limit)
    assert [row for begin, end in buckets for row in range(begin, end)] == [*range(len(lengths))]
    for begin, end in buckets:
        longest = max(lengths[begin:end])
        assert end - begin == 1 or longest * (end - begin) <= limit
        for cut in range(begin + 1, end):
            parts = lengths[begin:cut], lengths[cut:end]
            saved = longest * (end - begin) - sum(max(part) * len(part) for part in parts)
            assert saved <= cost


# Rotary tables

SCALINGS = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {"factor": 8.0, "high_freq_factor": 5.0, "original_max_position_embeddings": 512},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 512},
}
CASES: list[tuple[str, dict[str, Any]]] = [
    *SCALINGS.items(),
    ("llama3", {**SCALINGS["llama3"], "low_freq_factor": 2.0}),
    ("yarn", {**SCALINGS["yarn"], "attention_factor": 1.3}),
    ("yarn", {**SCALINGS["yarn"], "mscale": 0.7, "mscale_all_dim": 1.1}),
    ("yarn", {**SCALINGS["yarn"], "beta_fast": 20.0, "beta_slow": 2.0, "truncate": False}),
    ("yarn", {**SCALINGS["yarn"], "factor": 1.0}),
]


def config_with(scaling: RopeScaling | None) -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=8,
        hidden_size=64,
        intermediate_size=8,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=scaling,
    )


@pytest.mark.parametrize("length", [100, 5000])
@pytest.mark.parametrize(("kind", "fields"), CASES)
def test_frequencies_equal_the_reference(kind: str, fields: dict[str, Any], length: int) -> None:
    parameters = {"low_freq_factor": 1.0, **fields} if kind == "llama3" else fields
    theirs = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **parameters},
    )
    wanted, wanted_factor = ROPE_INIT_FUNCTIONS[kind](theirs, CPU, seq_len=length)
    ours = config_with(RopeScaling(kind=kind, **fields))
    got, factor = inverse_frequencies(ours, length)
    torch.testing.assert_close(torch.from_numpy(got), wanted, rtol=1e-6, atol=0)
    assert factor == pytest.approx(wanted_factor)


@pytest.mark.parametrize("length", [512, 513])
def test_longrope_has_other_factors_for_long_sequences(length: int) -> None:
    """They hold for all sequences where any may be longer than the training length."""
    numbers = range(1, 17)
    factors = {
        "short_factor": [1 + number / 16 for number in numbers],
        "long_factor": [1.0 + number for number in numbers],
    }
    theirs = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 512,
            **factors,
        },
    )
    wanted, wanted_factor = ROPE_INIT_FUNCTIONS["longrope"](theirs, CPU, seq_len=length)
    scaling = RopeScaling(
        kind="longrope",
        original_max_position_embeddings=512,
        attention_factor=wanted_factor,
        frequency_factors=tuple(factors["short_factor"]),
        long_factors=tuple(factors["long_factor"]),
        long_positions=2048,
    )
    got, factor = inverse_frequencies(config_with(scaling), length)
    torch.testing.assert_close(torch.from_numpy(got), wanted, rtol=1e-6, atol=0)
    assert factor == wanted_factor


def test_frequency_factors_divide() -> None:
    factors = tuple(float(i + 1) for i in range(16))
    plain, _ = inverse_frequencies(config_with(None), 10)
    scaled, factor = inverse_frequencies(
        config_with(RopeScaling(kind="factors", frequency_factors=factors)), 10
    )
    np.testing.assert_allclose(scaled * np.float32(factors), plain, rtol=1e-6)
    assert factor == 1.0


def test_table_holds_cosines_then_sines() -> None:
    scaling = RopeScaling(kind="yarn", factor=4.0, original_max_position_embeddings=512)
    table = cos_sin_table(config_with(scaling), 6)
    frequencies, factor = inverse_frequencies(config_with(scaling), 6)
    assert table.shape == (6, 32)
    assert table.dtype == np.float32
    for position in range(6):
        for pair in range(16):
            angle = position * float(frequencies[pair])
            assert table[position, pair] == pytest.approx(math.cos(angle) * factor, abs=1e-6)
            assert table[position, 16 + pair] == pytest.approx(math.sin(angle) * factor, abs=1e-6)


def test_pairs_that_are_not_rotated_stay_as_they_are() -> None:
    """Rotated ones have the factors of LongRoPE."""
    scaling = RopeScaling(
        kind="longrope", attention_factor=1.5, frequency_factors=tuple(range(1, 13))
    )
    config = attrs.evolve(config_with(scaling), rotary_part=0.75)
    table = cos_sin_table(config, 6)
    assert (table.shape, table.dtype) == ((6, 32), np.float32)
    for position in range(6):
        for pair in range(12):
            angle = position / (pair + 1) / 10000 ** (pair / 12)
            assert table[position, pair] == pytest.approx(1.5 * math.cos(angle), abs=1e-6)
            assert table[position, 16 + pair] == pytest.approx(1.5 * math.sin(angle), abs=1e-6)
    assert (table[:, 12:16] == 1).all()
    assert (table[:, 28:] == 0).all()


def test_unknown_scaling_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="other"):
        cos_sin_table(config_with(RopeScaling(kind="other")), 4)
