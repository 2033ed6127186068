"""Floors counted from shapes, and the verdicts on what was measured."""

from __future__ import annotations

import attrs
import pytest

from bench.kernels.__main__ import all_cases
from bench.kernels.roofline import (
    AttentionShape,
    Ceilings,
    Work,
    decode_attention,
    decode_step_parts,
    lora_update,
    prefill_attention,
    rms_norm,
    rope_and_write,
    sampling,
    shared_prefix_attention,
    silu_mul,
)
from bench.kernels.targets import OURS, Target
from bench.random_model import LLAMA_8B

H200 = Ceilings(copy=4.3e12, matrix=790e12)
LLAMA = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128)


class TestRoofline:
    def test_a_floor_is_the_longer_of_the_two_times(self) -> None:
        ceilings = Ceilings(copy=100.0, matrix=1000.0)
        assert ceilings.floor(Work(50, 100)) == 0.5
        assert ceilings.bound(Work(50, 100)) == "memory"
        assert ceilings.floor(Work(50, 2000)) == 2.0
        assert ceilings.bound(Work(50, 2000)) == "matrix"
        assert ceilings.floor(Work(50, 100), Work(50, 2000)) == 2.5

    def test_decode_counts_keys_and_values_once(self) -> None:
        work = decode_attention(LLAMA, [1024] * 8)
        cache = 8 * 1024 * 2 * 8 * 128 * 2
        assert work.bytes == cache + 8 * 2 * 32 * 128 * 2
        assert work.flops == 8 * 1024 * 4 * 32 * 128

    def test_an_e4m3_cache_has_half_the_bytes_and_its_scales(self) -> None:
        shape = attrs.evolve(LLAMA, fp8=True)
        assert shape.kv_bytes_per_token == 2 * 8 * (128 + 4)

    @pytest.mark.parametrize(("count", "context"), [(1, 1), (5, 5), (3, 9), (4, 40), (1, 30)])
    @pytest.mark.parametrize("window", [None, 1, 4, 100])
    def test_pairs_and_keys_are_those_of_the_mask(
        self, count: int, context: int, window: int | None
    ) -> None:
        one = AttentionShape(num_heads=1, num_kv_heads=1, head_dim=1)
        seen = [
            (query, key)
            for query in range(context - count, context)
            for key in range(query + 1)
            if window is None or key > query - window
        ]
        work = prefill_attention(one, [(count, context)], window)
        assert work.flops == 4 * len(seen)
        keys = len({key for _, key in seen})
        assert work.bytes == keys * one.kv_bytes_per_token + 2 * count * one.query_bytes_per_token

    def test_a_shared_prefix_is_read_once(self) -> None:
        work = shared_prefix_attention(LLAMA, 1024, [16, 32])
        alone = decode_attention(LLAMA, [1040, 1056])
        assert work.flops == alone.flops
        assert alone.bytes - work.bytes == 1024 * LLAMA.kv_bytes_per_token

    def test_small_kernels_take_the_published_times(self) -> None:
        """The floors that the design states for 8,192 tokens of Llama-3.1-8B, within 3%."""
        for work, microseconds in (
            (rms_norm(8192, 4096), 62),
            (silu_mul(8192, 14336), 164),
            (rope_and_write(LLAMA, 8192), 47),
            (sampling(256, 128256), 31),
            (lora_update(8192, 4, 4096, 4096, 16), 47),
        ):
            assert H200.floor(work) * 1e6 == pytest.approx(microseconds, rel=0.03)

    @pytest.mark.parametrize(
        ("rows", "context", "milliseconds"),
        [(1, 1024, 3.52), (32, 1024, 4.49), (32, 8192, 11.5), (256, 1024, 12.9)],
    )
    def test_a_step_of_llama_takes_the_published_times(
        self, rows: int, context: int, milliseconds: float
    ) -> None:
        parts = decode_step_parts(LLAMA_8B, [context] * rows)
        assert H200.floor(*parts) * 1e3 == pytest.approx(milliseconds, rel=0.01)


class TestTargets:
    @pytest.mark.parametrize(
        ("target", "reached", "met"),
        [
            (Target(kind="floor", value=0.75), 0.8, True),
            (Target(kind="floor", value=0.85), 0.8, False),
            (Target(kind="microseconds", value=11.0), 10.0, True),
            (Target(kind="microseconds", value=9.0), 10.0, False),
            (Target(kind="peer", value=1.0), 0.9, False),
            (Target(kind="peer", value=1.0, of="slow"), 2.0, True),
            (Target(kind="peer", value=1.0, of="missing"), None, None),
            (Target(kind="case", value=1.6, of="kernel b"), 1.7, True),
            (Target(kind="case", value=1.6, of="kernel c"), None, None),
        ],
    )
    def test_verdicts(self, target: Target, reached: float | None, met: bool | None) -> None:
        seconds = {OURS: 10e-6, "slow": 20e-6, "fast": 9e-6}
        found = target.reached(8e-6, seconds, {"kernel b": 17e-6})
        assert found == (None if reached is None else pytest.approx(reached))
        assert target.met(found) is met
        assert ("MISSED" in target.verdict(found)) == (met is False)

    def test_every_target_of_a_case_names_a_case_or_peer_that_exists(self) -> None:
        cases = all_cases(tiny=False)
        titles = [case.title for case in cases]
        assert len(set(titles)) == len(titles)
        for case in cases:
            for target in case.targets:
                assert target.kind != "case" or target.of in titles
