"""Packed products against float64: right to within their roundings, and the same in any batch."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Sequence

import gguf
import numpy as np
import pytest
import torch

from gpu.cpu.elementwise import CompiledOperations
from gpu.cpu.products import GGUF_KINDS, Kind, PackedProduct, PackedWeight, Pool, pack, pack_blocks
from gpu.weights.blocks import FLOAT32
from gpu.weights.dequantize import dequantize
from tests.support.kernels import MATRIX_UNITS
from trioserve.model_files.gguf_header import TENSOR_TYPES

pytestmark = pytest.mark.single_kernels

TYPES = {type_.name: type_ for type_ in TENSOR_TYPES.values()}
KINDS = list(Kind)
QUANTIZED = [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.W8A8]
ROWS = (1, 2, 3, 4, 5, 6, 7, 32, 33, 130, 600)
# [outputs, inputs]: strips that are not full, numbers of strips of every remainder, and inputs
# beyond those that are computed in one go.
SHAPES = ((17, 64), (100, 576), (960, 576), (50, 1536), (130, 4096), (33, 4096 + 32))

FLOAT = 2.0**-24
"""The largest relative error of one rounding to float32."""
BF16 = 2.0**-8
"""The unit roundoff of bfloat16."""


@pytest.fixture(scope="module")
def pools(each_way: str) -> Iterator[list[Pool]]:
    """A pool of one, two and three threads."""
    made = [Pool(threads) for threads in (1, 2, 3)]
    yield made
    for pool in made:
        pool.close()


@pytest.fixture(scope="module")
def pool(pools: list[Pool]) -> Pool:
    return pools[1]


def random(*size: int, seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator) * spread


def activations(rows: int, inputs: int) -> torch.Tensor:
    """With single large numbers among them, as models have."""
    x = random(rows, inputs, seed=rows)
    x[:, ::97] *= 50
    return x.bfloat16()


def blocks_of(weight: torch.Tensor, kind: Kind) -> torch.Tensor:
    """Return the weight in ggml's blocks, by the gguf package."""
    name = "Q8_0" if kind is Kind.W8A8 else kind.name
    array = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[name])
    return torch.from_numpy(array.copy()).view(torch.uint8).flatten()


def meant(weight: torch.Tensor, kind: Kind) -> torch.Tensor:
    """Return the numbers that the packed weight stands for, as float32."""
    if kind is Kind.BF16:
        return weight.bfloat16().float()
    type_ = TYPES["Q8_0" if kind is Kind.W8A8 else kind.name]
    numbers = dequantize(blocks_of(weight, kind).numpy(), type_, FLOAT32)
    return torch.from_numpy(numbers).view(weight.shape)


def bound_of_sums(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return what float32 may be off by when it adds up products, at worst.

    Numbers of 4 bits with minimums are sums of two parts, each larger than their difference: hence
    the factor.
    """
    return 4 * x.shape[1] * FLOAT * (x.double().abs() @ weight.double().abs().T)


def bound_of_rounding(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the largest error of activations that are rounded to 8 bits in groups of 32."""
    blocks = x.double().abs().view(len(x), -1, 32)
    steps = blocks.amax(2) / 127
    sums = weight.double().abs().view(len(weight), -1, 32).sum(2)
    return steps @ sums.T * 0.501


def check(
    y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, kind: Kind, bias: torch.Tensor | None
) -> None:
    expected = x.double() @ weight.double().T
    error = bound_of_sums(x, weight)
    if kind is Kind.W8A8:
        error += bound_of_rounding(x, weight)
    if bias is not None:
        expected += bias.double()
        error += FLOAT * expected.abs()
    if y.dtype == torch.bfloat16:
        error = error * (1 + BF16) + BF16 * expected.abs()
    assert ((y.double() - expected).abs() <= error).all()


def packed(weight: torch.Tensor, kind: Kind, pool: Pool) -> PackedWeight:
    if kind is Kind.BF16:
        return pack(weight, kind, pool)
    return pack_blocks(blocks_of(weight, kind), kind, weight.shape, pool)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_products_are_exact_to_within_their_roundings(
    kind: Kind, shape: tuple[int, int], pool: Pool
) -> None:
    weight = random(*shape, spread=0.05)
    bias = random(shape[0], seed=1)
    product = PackedProduct([packed(weight, kind, pool)])
    biased = PackedProduct([packed(weight, kind, pool)], bias)
    for rows in ROWS:
        x = activations(rows, shape[1])
        check(product.multiply(x, pool), x, meant(weight, kind), kind, None)
        check(biased.multiply(x, pool), x, meant(weight, kind), kind, bias)
        check(biased.multiply(x, pool, torch.float32), x, meant(weight, kind), kind, bias)


@pytest.mark.parametrize("shape", [(100, 576), (33, 4096 + 32)], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_row_is_the_same_bits_in_any_batch_and_on_any_number_of_threads(
    kind: Kind, shape: tuple[int, int], pools: list[Pool]
) -> None:
    product = PackedProduct([packed(random(*shape), kind, pools[0])], random(shape[0]))
    # More rows than go through the weights at once.
    x = activations(400, shape[1])
    together = product.multiply(x, pools[0], torch.float32)
    for pool in pools:
        for first, last in itertools.pairwise((0, 1, 3, 6, 10, 15, 21, 28, 36, 45, 180, 400)):
            alone = product.multiply(x[first:last], pool, torch.float32)
            assert torch.equal(alone, together[first:last])
    rounded = [product.multiply(x, pool) for pool in pools]
    assert all(torch.equal(y, together.bfloat16()) for y in rounded)


def matrix_unit_sums(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x @ weight.T [rows, outputs] as a matrix unit adds it up, in float32.

    Of each 32 inputs the even and the odd ones are added up apart, in order, and then both to the
    sum (Intel, Architecture Instruction Set Extensions, TDPBF16PS).
    """
    products = x.double()[:, None] * weight.double()[None]
    total = torch.zeros(products.shape[:2])
    for block in products.split(32, dim=2):
        halves = torch.zeros(2, *total.shape)
        for pair in block.unflatten(2, (16, 2)).unbind(2):
            halves = (halves.double() + pair.permute(2, 0, 1)).float()
        total = total + (halves[0] + halves[1])
    return total


@pytest.mark.parametrize("rows", [1, 16, 40])
def test_a_matrix_unit_adds_up_as_its_manual_says(rows: int, each_way: str, pool: Pool) -> None:
    weight, x = random(50, 1536).bfloat16(), random(rows, 1536, seed=1).bfloat16()
    y = PackedProduct([pack(weight, Kind.BF16, pool)]).multiply(x, pool, torch.float32)
    assert torch.equal(y, matrix_unit_sums(x, weight)) == (each_way in MATRIX_UNITS)


@pytest.mark.parametrize("inputs", [64, 1536])
def test_a_gated_product_has_the_bits_of_the_product_and_the_activation(
    inputs: int, each_way: str, pools: list[Pool]
) -> None:
    gate, up = (pack(random(160, inputs, seed=i).bfloat16(), Kind.BF16, pools[0]) for i in (0, 1))
    product = PackedProduct([gate, up])
    for rows in (1, 16, 17, 32, 33, 64, 100, 600):
        x = random(rows, inputs, seed=rows).bfloat16()
        x[3::7] *= 1e-37  # what is gated is below the normal numbers
        expected = CompiledOperations().silu_mul(product.multiply(x, pools[0]))
        for pool in pools:
            y = product.multiply_gated(x, pool)
            assert (y is not None) == (each_way in MATRIX_UNITS and rows > 16)
            assert y is None or torch.equal(y.view(torch.int16), expected.view(torch.int16))
    assert PackedProduct([gate]).multiply_gated(x, pools[0]) is None


@pytest.mark.parametrize(
    ("kinds", "sizes"),
    [
        ((Kind.Q4_0, Kind.Q8_0, Kind.Q4_1), (100, 33, 17)),
        ((Kind.W8A8, Kind.BF16), (64, 70)),
        ((Kind.Q4_1, Kind.W8A8, Kind.Q4_1), (16, 48, 15)),
    ],
    ids=["blocks", "with bf16", "minimums and rounded"],
)
def test_segments_of_different_kinds(
    kinds: Sequence[Kind], sizes: Sequence[int], pools: list[Pool]
) -> None:
    weights = [random(size, 576, seed=i) for i, size in enumerate(sizes)]
    bias = random(sum(sizes))
    product = PackedProduct(
        [packed(weight, kind, pools[0]) for weight, kind in zip(weights, kinds, strict=True)], bias
    )
    for rows in (1, 3, 33):
        x = activations(rows, 576)
        results = [product.multiply(x, pool) for pool in pools]
        assert all(torch.equal(result, results[0]) for result in results)
        parts = zip(results[0].split(sizes, 1), weights, kinds, bias.split(sizes), strict=True)
        for y, weight, kind, own_bias in parts:
            check(y, x, meant(weight, kind), kind, own_bias)


def test_eight_bits_lose_half_a_percent(pool: Pool) -> None:
    """Measure it against a product's norm, on normal numbers; weights alone lose as much again."""
    weight, x = random(960, 576), random(64, 576, seed=1).bfloat16()
    exact = x.double() @ weight.double().T
    lost = {}
    for kind in KINDS:
        y = PackedProduct([pack(weight, kind, pool)]).multiply(x, pool, torch.float32)
        lost[kind] = float((y.double() - exact).norm() / exact.norm())
    assert lost[Kind.BF16] < 0.002
    assert lost[Kind.Q8_0] < 0.007 < lost[Kind.W8A8] < 0.01
    assert lost[Kind.Q4_1] < lost[Kind.Q4_0] < 0.1


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_are_quantized_as_ggml_does(
    kind: Kind, dtype: torch.dtype, pools: list[Pool]
) -> None:
    weight = random(100, 576, spread=0.02).to(dtype)
    weight[3] = 0
    weight[4, 32:64] = -0.5
    weight[5, :32] = torch.arange(32) / 64
    expected = pack_blocks(blocks_of(weight.float(), kind), kind, weight.shape, pools[0])
    for pool in pools:
        assert torch.equal(pack(weight, kind, pool).memory, expected.memory)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bfloat16_is_packed_rounded_once(dtype: torch.dtype, pools: list[Pool]) -> None:
    weight = random(100, 576).to(dtype)
    for pool in pools:
        product = PackedProduct([pack(weight, Kind.BF16, pool)])
        assert torch.equal(product.rows(torch.arange(100), pool), weight.bfloat16())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_rows_are_those_of_the_dequantized_weight(kind: Kind, pools: list[Pool]) -> None:
    weight = random(100, 576)
    ids = torch.tensor([0, 99, 15, 16, 17, 50, 50])
    for pool in pools:
        product = PackedProduct([packed(weight, kind, pool)])
        assert torch.equal(product.rows(ids, pool), meant(weight, kind).bfloat16()[ids])
        assert product.rows(ids[:0], pool).shape == (0, 576)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_what_is_not_a_number_stays_in_its_row(kind: Kind, pool: Pool) -> None:
    product = PackedProduct([packed(random(50, 64), kind, pool)])
    x = activations(9, 64)
    clean = product.multiply(x, pool)
    x[4, 40] = float("nan")
    x[6, 3] = float("inf")
    y = product.multiply(x, pool)
    assert y[4].isnan().all()
    assert not y[6].isfinite().any()
    others = [0, 1, 2, 3, 5, 7, 8]
    assert torch.equal(y[others], clean[others])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_nothing_but_results_and_scratch_is_written(kind: Kind, pools: list[Pool]) -> None:
    weight = random(50, 4096 + 32)
    product = PackedProduct([packed(weight, kind, pools[0])])
    for pool in pools:
        for rows in (1, 3, 70):
            size = len(product.scratch(rows, pool.threads))
            scratch = torch.full((size + 4096,), 0x5A, dtype=torch.uint8)
            out = torch.full((rows + 2, 50), 7.0, dtype=torch.bfloat16)
            product.multiply(activations(rows, 4096 + 32), pool, out=out[1:-1], scratch=scratch)
            assert (scratch[size:] == 0x5A).all()
            assert (out[[0, -1]] == 7).all()


def test_no_rows(pool: Pool) -> None:
    product = PackedProduct([pack(random(50, 64), Kind.Q4_1, pool)])
    assert product.multiply(torch.empty(0, 64, dtype=torch.bfloat16), pool).shape == (0, 50)


def test_a_packed_weight_takes_no_more_than_its_blocks(pool: Pool) -> None:
    sizes = {
        kind: pack(random(64, 576), kind, pool).memory.nbytes * 32 / (64 * 576) for kind in KINDS
    }
    assert sizes == {
        Kind.BF16: 64,
        Kind.Q8_0: 34,
        Kind.Q4_0: 18,
        Kind.Q4_1: 20,
        Kind.W8A8: 34,
    }
    assert set(GGUF_KINDS) == {"Q8_0", "Q4_0", "Q4_1"}


def test_wrong_arguments_are_refused(pool: Pool) -> None:
    weight = pack(random(50, 64), Kind.Q8_0, pool)
    with pytest.raises(ValueError, match="33 inputs"):
        pack(random(50, 33), Kind.BF16, pool)
    with pytest.raises(ValueError, match="float64"):
        pack(random(50, 64).double(), Kind.BF16, pool)
    with pytest.raises(ValueError, match="3 bytes of blocks, 6800 expected"):
        pack_blocks(torch.zeros(3, dtype=torch.uint8), Kind.Q8_0, (100, 64), pool)
    with pytest.raises(ValueError, match="4 weights"):
        PackedProduct([weight] * 4)
    with pytest.raises(ValueError, match="different numbers of inputs"):
        PackedProduct([weight, pack(random(50, 96), Kind.Q8_0, pool)])
    with pytest.raises(ValueError, match=r"bias of \[3\]"):
        PackedProduct([weight], torch.zeros(3))
    product = PackedProduct([weight])
    with pytest.raises(ValueError, match="64 inputs"):
        product.multiply(random(2, 32).bfloat16(), pool)
    with pytest.raises(ValueError, match="of 50"):
        product.rows(torch.tensor([50]), pool)
    with pytest.raises(ValueError, match="single weight"):
        PackedProduct([weight, weight]).rows(torch.tensor([0]), pool)


def test_a_product_that_precedes_another_is_the_same(pools: list[Pool]) -> None:
    first = PackedProduct([packed(random(100, 576), Kind.Q4_0, pools[0])])
    second = PackedProduct([packed(random(33, 4096 + 32, seed=1), Kind.Q8_0, pools[0])])
    x = activations(20, 576)
    alone = first.multiply(x, pools[0])
    first.precedes(second)
    assert all(torch.equal(first.multiply(x, pool), alone) for pool in pools)


def test_the_struct_is_that_of_the_header(pool: Pool) -> None:
    """Check the size of a product with three segments: 40 bytes and three times 32."""
    product = PackedProduct([pack(random(16, 64), Kind.Q8_0, pool)] * 3)
    assert ctypes.sizeof(product.struct) == 136
    assert [segment.first for segment in product.struct.segments] == [0, 16, 32]
    assert np.frombuffer(product.struct, dtype=np.int64)[[0, 1, 3]].tolist() == [64, 48, 3]
