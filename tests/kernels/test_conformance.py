"""Each instruction of ``hardware.cuh``: fragment layouts, copies, conversions.

The layouts are checked against those that CuTe publishes, not against the emulation's own words;
on a GPU the same tests confirm both.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from gpu.kernels import KernelLoader, KernelSource, element_name, parameters
from gpu.kernels.emulation import ROUGH, EmulatedLoader
from tests.kernels.memory import place, poisoned

pytestmark = pytest.mark.every_arithmetic

FILE = Path(__file__).parent / "conformance.cu"
PARAMETERS = parameters(("a", "u8"), ("b", "u8"), ("c", "u8"), ("out", "u8"), ("num", "i4"))
HALVES = [torch.bfloat16, torch.float16]
E4M3 = torch.float8_e4m3fn


def run(
    loader: KernelLoader,
    name: str,
    out: torch.Tensor,
    a: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    *,
    num: int = 0,
    element: torch.dtype = torch.bfloat16,
    num_threads: int = 32,
    num_blocks: int = 1,
    file: Path = FILE,
    shared_bytes: int = 0,
) -> torch.Tensor:
    """Launch ``name`` of ``file``, and return ``out`` on the CPU."""
    half = element if element in HALVES else torch.bfloat16
    source = KernelSource(
        name=name,
        parameters=PARAMETERS,
        num_threads=num_threads,
        defines=(("TYPE", element_name(element)), ("HALF", element_name(half))),
        file=str(file),
        shared_bytes=shared_bytes,
    )
    arguments = np.zeros(1, PARAMETERS)
    placed = [None if x is None else place(x, loader) for x in (a, b, c)]
    for field, tensor in zip("abc", placed, strict=True):
        arguments[field] = 0 if tensor is None else tensor.data_ptr()
    arguments["out"], arguments["num"] = out.data_ptr(), num
    loader.load(source).launch((num_blocks, 1, 1), arguments)
    return out.cpu()


def over_all(
    loader: KernelLoader,
    name: str,
    out: torch.Tensor,
    a: torch.Tensor,
    num: int,
    element: torch.dtype,
) -> torch.Tensor:
    """``run`` over ``num`` elements."""
    blocks = -(-num // 256)
    return run(loader, name, out, a, num=num, element=element, num_threads=256, num_blocks=blocks)


def cute(shape: tuple[int, ...], stride: tuple[int, ...], index: int) -> int:
    """Return the value of a CuTe layout at a flat index: the first mode is the fastest."""
    value = 0
    for size, step in zip(shape, stride, strict=True):
        value += index % size * step
        index //= size
    return value


def fragments(
    matrix: torch.Tensor,
    lanes: tuple[tuple[int, ...], tuple[int, ...]],
    values: tuple[tuple[int, ...], tuple[int, ...]],
) -> torch.Tensor:
    """Return ``matrix`` by lane, [32, values]; its first dimension is CuTe's fastest."""
    flat = matrix.T.reshape(-1)
    num_values = int(np.prod(values[0]))
    index = [
        [cute(*lanes, lane) + cute(*values, value) for value in range(num_values)]
        for lane in range(32)
    ]
    return flat[torch.tensor(index)]


# cutlass/include/cute/atom/mma_traits_sm80.hpp, SM80_16x8x16_F32F16F16F32_TN (and BF16).
A_LAYOUT = (((4, 8), (32, 1)), ((2, 2, 2), (16, 8, 128)))
B_LAYOUT = (((4, 8), (16, 1)), ((2, 2), (8, 64)))
C_LAYOUT = (((4, 8), (32, 1)), ((2, 2), (16, 8)))


@pytest.mark.parametrize("element", HALVES)
def test_mma_fragments(loader: KernelLoader, element: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    a = torch.randn(16, 16, generator=generator).to(element)  # M x K
    b = torch.randn(8, 16, generator=generator).to(element)  # N x K
    c = torch.randn(16, 8, generator=generator)  # M x N
    out = poisoned((32, 4), torch.float32, loader)
    result = run(
        loader,
        "multiply",
        out,
        fragments(a, *A_LAYOUT),
        fragments(b, *B_LAYOUT),
        fragments(c, *C_LAYOUT),
        element=element,
    )
    expected = fragments(c.double() + a.double() @ b.double().T, *C_LAYOUT)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)


def test_mma_cuts_sums_off_in_rough_arithmetic(loader: KernelLoader, arithmetic: str) -> None:
    """Terms are aligned to the largest; of a sum that lies between two floats the smaller stays."""
    if not isinstance(loader, EmulatedLoader):
        pytest.skip("a GPU sums as it does")
    a, b, c = torch.zeros(16, 16), torch.ones(8, 16), torch.zeros(16, 8)
    c[:2] = 1.0
    a[0, 0] = 1.5 * 2**-23  # 1 + 1.5 ulp
    a[1, :8] = 2**-25  # 1 + 8 times a quarter of an ulp, each below the last bit that is kept
    a[2, 0], a[2, 8] = 1.0, -(2**-24)  # another block: 1 - half an ulp of what is below 1
    out = poisoned((32, 4), torch.float32, loader)
    operands = (
        fragments(a.bfloat16(), *A_LAYOUT),
        fragments(b.bfloat16(), *B_LAYOUT),
        fragments(c, *C_LAYOUT),
    )
    result = run(loader, "multiply", out, *operands, element=torch.bfloat16)
    rows = [result[4 * row, 0].item() - 1 for row in range(3)]
    if arithmetic == ROUGH:
        assert rows == [2**-23, 0, -(2**-24)]
    else:
        assert rows == [2 * 2**-23, 0, -(2**-24)]


@pytest.mark.parametrize("element", HALVES)
def test_mma_takes_subnormal_and_special_numbers(
    loader: KernelLoader, element: torch.dtype
) -> None:
    """Check that the smallest numbers aren't flushed to 0; infinity and NaN stay in their row."""
    a = torch.zeros(16, 16, dtype=element)
    a.view(torch.int16)[0, 0] = 1  # the smallest subnormal number
    a[1, 1], a[2, 2], a[3, 3] = torch.inf, -torch.inf, torch.nan
    a[4, 4] = torch.finfo(element).max
    b = torch.ones(8, 16, dtype=element)
    out = poisoned((32, 4), torch.float32, loader)
    zero = torch.zeros(32, 4)
    result = run(
        loader,
        "multiply",
        out,
        fragments(a, *A_LAYOUT),
        fragments(b, *B_LAYOUT),
        zero,
        element=element,
    )
    expected = fragments(a.float() @ b.float().T, *C_LAYOUT)
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


# cutlass/include/cute/atom/copy_traits_sm75.hpp, SM75_U32x4_LDSM_N and SM75_U16x8_LDSM_T: where in
# the rows, in bits, each lane's values come from.
@pytest.mark.parametrize(
    ("transposed", "layout"),
    [
        (0, (((32,), (32,)), ((2, 4), (16, 1024)))),
        (1, (((4, 8), (256, 16)), ((2, 4), (128, 1024)))),
    ],
)
def test_ldmatrix(
    loader: KernelLoader,
    transposed: int,
    layout: tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]],
) -> None:
    rows = torch.arange(256, dtype=torch.int16)  # 32 rows of 8 elements
    lanes, values = layout
    out = run(loader, "load_matrices", poisoned((32, 8), torch.int16, loader), rows, num=transposed)
    for lane in range(32):
        for value in range(8):
            bit = cute(*lanes, lane) + cute(*values, value)
            assert out[lane, value] == rows[bit // 16]


@pytest.mark.parametrize("num_valid", [0, 1, 20, 32])
def test_an_invalid_asynchronous_copy_writes_zeros(loader: KernelLoader, num_valid: int) -> None:
    source = torch.randint(1, 100, (max(num_valid, 1), 4), dtype=torch.int32)
    out = run(loader, "copy_async", poisoned((32, 4), torch.int32, loader), source, num=num_valid)
    assert torch.equal(out[:num_valid], source[:num_valid])
    assert not out[num_valid:].any()


def all_patterns(element: torch.dtype) -> torch.Tensor:
    if element.itemsize == 1:
        return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(element)
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(element)


@pytest.mark.parametrize("element", [*HALVES, E4M3])
def test_every_element_widens_as_in_torch(loader: KernelLoader, element: torch.dtype) -> None:
    elements = all_patterns(element)
    out = poisoned((len(elements),), torch.float32, loader)
    result = over_all(loader, "widen", out, elements, len(elements), element)
    torch.testing.assert_close(result, elements.float(), rtol=0, atol=0, equal_nan=True)


def floats_around(element: torch.dtype) -> torch.Tensor:
    """Return all elements, middles of two neighbors, and floats next to those, with both signs."""
    exact = all_patterns(element).float()
    exact = exact[exact.isfinite() & (exact >= 0)].sort().values.unique()
    middles = ((exact[1:].double() + exact[:-1].double()) / 2).float()
    edges = torch.cat([exact, middles])
    bits = edges.view(torch.int32)
    near = torch.cat([bits, bits + 1, (bits - 1).clamp(min=0)]).view(torch.float32)
    special = torch.tensor([0.0, torch.inf, torch.nan, 1e30, 1e-40, 1e-30])
    both = torch.cat([near, special])
    return torch.cat([both, -both])


def rounded(x: torch.Tensor, element: torch.dtype) -> torch.Tensor:
    if element == E4M3:  # torch gives NaN past the largest number, the kernels saturate
        x = torch.where(x.isnan(), x, x.clamp(-448, 448))
    return x.to(element)


def same_elements(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bits are the same, those of NaN aside."""
    bits: Callable[[torch.Tensor], torch.Tensor] = lambda x: x.view(  # noqa: E731
        torch.uint8 if x.dtype.itemsize == 1 else torch.int16
    )
    nan = expected.float().isnan()
    return bool(
        torch.equal(actual.float().isnan(), nan)
        and torch.equal(bits(actual)[~nan], bits(expected)[~nan])
    )


@pytest.mark.parametrize("element", [*HALVES, E4M3])
def test_floats_round_to_the_nearest_element_as_in_torch(
    loader: KernelLoader, element: torch.dtype
) -> None:
    x = floats_around(element)
    out = poisoned((len(x),), element, loader)
    result = over_all(loader, "narrow", out, x, len(x), element)
    assert same_elements(result, rounded(x, element))


@pytest.mark.parametrize("element", HALVES)
def test_pairs_are_packed_with_the_first_below(loader: KernelLoader, element: torch.dtype) -> None:
    x = floats_around(element)
    out = poisoned((len(x),), element, loader)
    result = over_all(loader, "pack_pairs", out, x, len(x) // 2, element)
    assert same_elements(result, rounded(x, element))


@pytest.mark.parametrize("element", HALVES)
def test_four_e4m3_unpack_exactly(loader: KernelLoader, element: torch.dtype) -> None:
    codes = torch.arange(1024, dtype=torch.int32).mul(37).to(torch.uint8)
    assert len(codes.unique()) == 256
    out = poisoned((1024,), element, loader)
    result = over_all(loader, "unpack_e4m3", out, codes, 256, element)
    assert same_elements(result, codes.view(E4M3).to(element))


def test_four_floats_pack_to_e4m3(loader: KernelLoader) -> None:
    x = floats_around(E4M3)
    x = x[: len(x) // 4 * 4]
    out = poisoned((len(x),), E4M3, loader)
    result = over_all(loader, "pack_e4m3", out, x, len(x) // 4, torch.bfloat16)
    assert same_elements(result, rounded(x, E4M3))


def test_approximations(loader: KernelLoader) -> None:
    """Relative errors as the PTX ISA states them, for results and arguments that are not tiny."""
    x = torch.cat([torch.linspace(-100, 100, 999), torch.logspace(-20, 20, 999), torch.zeros(1)])
    out = poisoned((len(x), 4), torch.float32, loader)
    result = over_all(loader, "approximate", out, x, len(x), torch.bfloat16).double()
    x = x.double()
    normal = x.exp2() < torch.finfo(torch.float32).max
    torch.testing.assert_close(result[normal, 0], x[normal].exp2(), rtol=2**-21, atol=1e-37)
    positive = x > 0
    torch.testing.assert_close(result[positive, 1], x[positive].log2(), rtol=2**-20, atol=2**-20)
    torch.testing.assert_close(result[positive, 2], x[positive].rsqrt(), rtol=2**-20, atol=0)
    torch.testing.assert_close(result[x != 0, 3], 1 / x[x != 0], rtol=2**-21, atol=0)
    assert result[-1].tolist() == [1, -torch.inf, torch.inf, torch.inf]
    less = run(
        loader,
        "approximate",
        poisoned((1, 4), torch.float32, loader),
        torch.tensor([-torch.inf]),
        num=1,
    )
    assert less[0, 0] == 0  # a masked score has no weight


def test_rough_approximations_are_off_and_flush(loader: KernelLoader, arithmetic: str) -> None:
    if not isinstance(loader, EmulatedLoader):
        pytest.skip("a GPU is off as it is")
    x = torch.linspace(2.01, 99, 999)  # next to 1 the error of a logarithm is absolute
    out = poisoned((len(x), 4), torch.float32, loader)
    result = over_all(loader, "approximate", out, x, len(x), torch.bfloat16)
    exact = torch.stack([x.exp2(), x.log2(), x.rsqrt(), 1 / x], dim=1)
    apart = (result.view(torch.int32) - exact.view(torch.int32)).abs()
    # Both the emulation's and torch's functions are exact to a unit in the last place.
    assert apart.max() <= (4 if arithmetic == ROUGH else 2)
    for column in range(4):
        share = (apart[:, column] > 1).double().mean()
        assert (share > 0.2) == (arithmetic == ROUGH), column
    tiny = torch.tensor([-126.5, 2.0**-127, 2.0**-127, 2.0**-127])
    out = poisoned((len(tiny), 4), torch.float32, loader)
    flushed = over_all(loader, "approximate", out, tiny, len(tiny), torch.bfloat16)
    if arithmetic == ROUGH:
        assert flushed[0, 0] == 0
        assert flushed[1, 1:].tolist() == [-torch.inf, torch.inf, torch.inf]
    else:
        assert 0 < flushed[0, 0] < 2.0**-126
        assert flushed[1, 1:].isfinite().all()


@pytest.mark.parametrize("num", [0, 1, 33, 96])
def test_shuffles_counts_and_atomics(loader: KernelLoader, num: int) -> None:
    blocks = 3
    out = torch.zeros(blocks + 2, dtype=torch.int32)
    placed = place(out, loader)
    result = run(loader, "exchange", placed, num=num, num_threads=96, num_blocks=blocks)
    total = num * (num - 1) // 2
    assert result.tolist() == [total] * blocks + [blocks * num, total + blocks - 1]
