"""Norm, rotation and cache write in one kernel, against float64 and torch's own e4m3."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from gpu.attention import QkNorm
from gpu.kernels import KernelLoader
from gpu.kernels.attention_tile import HEAD_DIMS
from gpu.kernels.rope_and_write import RopeAndWrite
from gpu.models.rope import cos_sin_table
from tests.kernels.memory import place, poisoned, poisoned_cache, relative_error
from tests.kernels.rounding import share_rounded_otherwise
from trioserve.model_files.config import ModelConfig, RopeScaling

pytestmark = pytest.mark.every_arithmetic

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
ROUNDING = {BF16: 3e-3, FP16: 4e-4}
EPS = 0.25  # large, so that it shows in the results
MAX_LEN = 512


@attrs.frozen(kw_only=True)
class Case:
    """The inputs of one launch. Tokens are scattered over the pages at random."""

    head_dim: int = 64
    num_heads: int = 6
    num_kv_heads: int = 2
    page_size: int = 16
    num_pages: int = 5
    dtype: torch.dtype = BF16
    cache_dtype: torch.dtype = BF16
    num_tokens: int = 7
    rotate: bool = True
    normed: bool = False
    skipped: tuple[int, ...] = ()
    seed: int = 0
    table: torch.Tensor | None = None

    @property
    def num_normed(self) -> int:
        return self.num_heads + self.num_kv_heads

    def inputs(self) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        heads = self.num_heads + 2 * self.num_kv_heads
        angles = torch.rand(MAX_LEN, self.head_dim // 2, generator=generator) * 7
        table = torch.cat([angles.cos(), angles.sin()], dim=-1)
        places = torch.randperm(self.num_pages * self.page_size, generator=generator)
        locations = places[: self.num_tokens].clone()
        locations[list(self.skipped)] = -1
        qkv = torch.randn(self.num_tokens, heads, self.head_dim, generator=generator) * 2
        weight = torch.rand(self.num_normed, self.head_dim, generator=generator) + 0.5
        positions = torch.randint(0, MAX_LEN, (self.num_tokens,), generator=generator)
        return {
            "qkv": qkv.to(self.dtype),
            "table": table if self.table is None else self.table,
            "positions": positions.to(torch.int32),
            "locations": locations.to(torch.int32),
            "weight": weight.to(self.dtype),
        }


@attrs.frozen
class Written:
    """The outputs of a launch."""

    qkv: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor

    def bits(self) -> list[torch.Tensor]:
        return [tensor.view(torch.uint8).cpu() for tensor in attrs.astuple(self)]


def run(loader: KernelLoader, case: Case) -> Written:
    inputs = {name: place(tensor, loader) for name, tensor in case.inputs().items()}
    kernel = RopeAndWrite(
        loader,
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        page_size=case.page_size,
        dtype=case.dtype,
        cache_dtype=case.cache_dtype,
        cos_sin=inputs["table"],
    )
    k_cache, v_cache = poisoned_cache(
        num_pages=case.num_pages,
        num_kv_heads=case.num_kv_heads,
        page_size=case.page_size,
        head_dim=case.head_dim,
        dtype=case.cache_dtype,
        loader=loader,
    )
    shape = (case.num_pages, case.num_kv_heads, case.page_size)
    k_scale, v_scale = (poisoned(shape, torch.float32, loader) for _ in range(2))
    scales: dict[str, Any] = {}
    if case.cache_dtype == E4M3:
        scales = {"k_scale": k_scale, "v_scale": v_scale}
    kernel.prepare(inputs["positions"], inputs["locations"])
    kernel.launch(
        inputs["qkv"],
        k_cache,
        v_cache,
        rotate=case.rotate,
        qk_norm=QkNorm(inputs["weight"], EPS) if case.normed else None,
        **scales,
    )
    return Written(inputs["qkv"], k_cache, v_cache, k_scale, v_scale)


def reference(case: Case) -> torch.Tensor:
    """Normed and rotated queries and keys, and values, as they were: float64, shaped as qkv."""
    inputs = case.inputs()
    qkv = inputs["qkv"].double()
    x = qkv[:, : case.num_normed]
    if case.normed:
        x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * inputs["weight"].double()
    if case.rotate:
        angles = inputs["table"].double()[inputs["positions"].long().clamp(min=0), None]
        cos, sin = angles.chunk(2, dim=-1)
        a, b = x.chunk(2, dim=-1)
        x = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    return torch.cat([x, qkv[:, case.num_normed :]], dim=1)


def at_locations(cache: torch.Tensor, case: Case) -> torch.Tensor:
    """Return what the cache has of each written token: [tokens, num_kv_heads, ...]."""
    locations = case.inputs()["locations"].long()
    locations = locations[locations >= 0]
    return cache.cpu()[locations // case.page_size, :, locations % case.page_size]


def check_nothing_else_was_written(written: Written, case: Case) -> None:
    """Whatever is at no token's location is as it was: full of 0xFF bytes."""
    locations = case.inputs()["locations"].long()
    locations = locations[locations >= 0]
    everywhere = torch.ones(case.num_pages, case.page_size, dtype=torch.bool)
    everywhere[locations // case.page_size, locations % case.page_size] = False
    parts = [written.k_cache, written.v_cache]
    if case.cache_dtype == E4M3:
        parts += [written.k_scale[..., None], written.v_scale[..., None]]
    for part in parts:
        left = part.cpu().transpose(1, 2)[everywhere]
        assert (left.contiguous().view(torch.uint8) == 0xFF).all()


def check(loader: KernelLoader, case: Case) -> Written:
    written, wanted = run(loader, case), reference(case)
    tolerance = ROUNDING[case.dtype]
    heads, keys_end = case.num_heads, case.num_normed
    queries = written.qkv[:, :heads]
    assert relative_error(queries, wanted[:, :heads]) < tolerance
    assert share_rounded_otherwise(queries, wanted[:, :heads]) < 0.005
    kept = case.inputs()["qkv"]
    assert torch.equal(written.qkv[:, heads:].cpu(), kept[:, heads:])
    in_cache = case.inputs()["locations"] >= 0
    keys, values = wanted[in_cache, heads:keys_end], wanted[in_cache, keys_end:]
    if case.cache_dtype == E4M3:
        check_quantized(written.k_cache, written.k_scale, keys, case)
        check_quantized(written.v_cache, written.v_scale, values, case)
    else:
        assert relative_error(at_locations(written.k_cache, case), keys) < tolerance
        assert share_rounded_otherwise(at_locations(written.k_cache, case), keys) < 0.005
        # Values only move: the same bits.
        assert torch.equal(at_locations(written.v_cache, case), kept[in_cache, keys_end:])
    check_nothing_else_was_written(written, case)
    return written


def check_quantized(
    cache: torch.Tensor, scale: torch.Tensor, wanted: torch.Tensor, case: Case
) -> None:
    """Scales are absmax / 448; a code is the e4m3 nearest to value / scale, or where float32 rounds
    to the other side of a tie, its neighbor."""
    scales = wanted.abs().amax(-1) / 448
    scales[scales == 0] = 1
    torch.testing.assert_close(
        at_locations(scale, case).double(), scales, rtol=1e-5, atol=0, msg="scales"
    )
    codes = at_locations(cache, case)
    nearest = (wanted / scales[..., None]).float().to(E4M3)
    differ = codes.float() != nearest.float()
    assert differ.double().mean() < 2e-3
    steps = codes.view(torch.uint8).int() - nearest.view(torch.uint8).int()
    assert (steps[differ].abs() == 1).all()
    got = codes.double() * at_locations(scale, case).double()[..., None]
    assert relative_error(got, wanted) < 0.04


@pytest.mark.parametrize("cache", ["model's dtype", "e4m3"])
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_sizes_and_dtypes(
    loader: KernelLoader, head_dim: int, dtype: torch.dtype, cache: str
) -> None:
    cache_dtype = E4M3 if cache == "e4m3" else dtype
    check(loader, Case(head_dim=head_dim, dtype=dtype, cache_dtype=cache_dtype, normed=True))


@pytest.mark.parametrize("cache_dtype", [BF16, E4M3])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rotate", [False, True])
def test_norm_and_rotation_alone(
    loader: KernelLoader, rotate: bool, normed: bool, cache_dtype: torch.dtype
) -> None:
    check(loader, Case(rotate=rotate, normed=normed, cache_dtype=cache_dtype))


def test_nothing_to_compute_moves_the_same_bits(loader: KernelLoader) -> None:
    case = Case(rotate=False)
    written, qkv = run(loader, case), case.inputs()["qkv"]
    assert torch.equal(written.qkv.cpu(), qkv)
    assert torch.equal(at_locations(written.k_cache, case), qkv[:, 6:8])
    assert torch.equal(at_locations(written.v_cache, case), qkv[:, 8:])


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (9, 3), (32, 8), (5, 5), (16, 1)])
@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_heads_and_pages(
    loader: KernelLoader, num_heads: int, num_kv_heads: int, page_size: int
) -> None:
    case = Case(num_heads=num_heads, num_kv_heads=num_kv_heads, page_size=page_size)
    check(loader, case)


def test_many_tokens_share_no_blocks_and_few_do(loader: KernelLoader) -> None:
    """With many tokens one block goes through all heads of a token; the bits are the same."""
    few = Case(num_heads=32, num_kv_heads=8, num_tokens=3, num_pages=9)
    many = attrs.evolve(few, num_tokens=8 * loader.num_multiprocessors, num_pages=80)
    check(loader, few)
    check(loader, many)


@pytest.mark.parametrize("cache_dtype", [BF16, E4M3])
def test_a_skipped_token_is_rotated_and_not_written(
    loader: KernelLoader, cache_dtype: torch.dtype
) -> None:
    check(loader, Case(skipped=(0, 3, 6), cache_dtype=cache_dtype))


def test_a_negative_position_reads_the_first_row(loader: KernelLoader) -> None:
    case = Case(num_tokens=1, skipped=(0,))
    inputs = {name: place(tensor, loader) for name, tensor in case.inputs().items()}
    inputs["positions"].fill_(-1)
    inputs["table"][0] = torch.cat([torch.ones(32), torch.zeros(32)])
    kernel = RopeAndWrite(
        loader,
        num_heads=6,
        num_kv_heads=2,
        head_dim=64,
        page_size=16,
        dtype=BF16,
        cache_dtype=BF16,
        cos_sin=inputs["table"],
    )
    cache = poisoned((5, 2, 16, 64), BF16, loader)
    kernel.prepare(inputs["positions"], inputs["locations"])
    kernel.launch(inputs["qkv"], cache, cache, rotate=True)
    assert torch.equal(inputs["qkv"].cpu(), case.inputs()["qkv"])


SCALINGS = [
    None,
    RopeScaling(kind="linear", factor=4.0),
    RopeScaling(kind="factors", frequency_factors=tuple(1.0 + i / 8 for i in range(32))),
    RopeScaling(kind="dynamic", factor=4.0),
    RopeScaling(
        kind="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=128,
    ),
    RopeScaling(kind="yarn", factor=4.0, original_max_position_embeddings=128),
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: s.kind if s else "plain")
def test_every_scaling(loader: KernelLoader, scaling: RopeScaling | None) -> None:
    config = ModelConfig(
        family="llama",
        vocab_size=8,
        hidden_size=64,
        intermediate_size=8,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=64,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=scaling,
    )
    check(loader, Case(table=torch.from_numpy(cos_sin_table(config, MAX_LEN)), num_tokens=20))


def test_e4m3_of_zeros_and_of_extremes(loader: KernelLoader) -> None:
    """Check that a head of zeros has scale 1, and that tiny and huge heads are as exact."""
    case = Case(cache_dtype=E4M3, rotate=False, num_tokens=5)
    inputs = {name: place(tensor, loader) for name, tensor in case.inputs().items()}
    sizes = torch.tensor([0.0, 1e-37, 1e-20, 1.0, 1e20])
    qkv = place(torch.ones(5, 10, 64) * sizes[:, None, None], loader).to(BF16)
    kernel = RopeAndWrite(
        loader,
        num_heads=6,
        num_kv_heads=2,
        head_dim=64,
        page_size=16,
        dtype=BF16,
        cache_dtype=E4M3,
        cos_sin=inputs["table"],
    )
    caches = poisoned_cache(
        num_pages=5, num_kv_heads=2, page_size=16, head_dim=64, dtype=E4M3, loader=loader
    )
    scales = [poisoned((5, 2, 16), torch.float32, loader) for _ in range(2)]
    kernel.prepare(inputs["positions"], inputs["locations"])
    kernel.launch(qkv, *caches, rotate=False, k_scale=scales[0], v_scale=scales[1])
    for cache, scale in zip(caches, scales, strict=True):
        codes, factors = at_locations(cache, case).float(), at_locations(scale, case)
        assert codes.flatten(1).amax(1).tolist() == [0, 0, 448, 448, 448]
        assert factors[:2].eq(1).all()
        exact = sizes.to(BF16).double()[2:, None] / 448
        torch.testing.assert_close(factors[2:].double(), exact.expand(-1, 2), rtol=1e-5, atol=0)


@pytest.mark.parametrize("cache_dtype", [BF16, E4M3])
def test_the_order_of_threads_does_not_matter(
    loaders: list[KernelLoader], cache_dtype: torch.dtype
) -> None:
    case = Case(head_dim=80, cache_dtype=cache_dtype, normed=True)
    first, *others = (run(loader, case).bits() for loader in loaders)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 72}, "heads of 72"),
        ({"dtype": torch.float32}, "float32"),
        ({"cache_dtype": FP16}, "cache of torch.float16"),
        ({"page_size": 24}, "page of 24"),
        ({"cos_sin": torch.zeros(4, 32)}, "rotary table"),
        ({"cos_sin": torch.zeros(64, 4).T}, "contiguous"),
    ],
)
def test_refusals(loader: KernelLoader, changes: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
        "page_size": 16,
        "dtype": BF16,
        "cache_dtype": BF16,
        "cos_sin": torch.zeros(4, 64, device=loader.device),
    }
    RopeAndWrite(loader, **good)
    with pytest.raises(ValueError, match=message):
        RopeAndWrite(loader, **{**good, **changes})
