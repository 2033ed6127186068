"""Products of w8a8 on a matrix unit: every bit is that of AVX-512 with VNNI."""

from __future__ import annotations

import pytest
import torch

from gpu.cpu.build import build
from gpu.cpu.products import Kind, PackedProduct, Pool, pack
from tests.support.kernels import computing_with, isas, tile_functions

UNITS = [way for way in isas(twins=True) if way.startswith("amx")]
VECTORS = ("avx512", "avx512_bf16")
# [outputs, inputs] and numbers of rows: strips that are not full, numbers of strips of every
# remainder, inputs that are computed in several goes, and rows in several chunks.
CASES = (
    ((17, 64), range(1, 601)),
    ((100, 576), (*range(1, 70), 127, 128, 129, 511, 599, 600)),
    ((50, 1536), (8, 9, 16, 17, 32, 33, 49, 340, 600)),
    ((130, 4096), (9, 31, 129, 257)),
    ((33, 4096 + 32), (7, 9, 40, 120, 121, 600)),
)

pytestmark = pytest.mark.skipif(not UNITS, reason="no AVX-512 with BF16, or no C++ compiler")


def activations(rows: int, inputs: int) -> torch.Tensor:
    """Return numbers with large ones among them, and rows that are tiny, 0 or no numbers.

    The scales of the tiny ones' products are below float32's normal numbers.
    """
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(inputs))
    x[:, ::97] *= 50
    x[3::7] *= 1e-35
    x[5::29] = 0
    x[6::31, 40] = float("nan")
    x[7::37, 3] = float("inf")
    return x.bfloat16()


def bits(y: torch.Tensor) -> torch.Tensor:
    """Return the bits of numbers, the same ones for all that are not numbers."""
    return torch.where(y.isnan(), torch.tensor(float("nan")), y).view(torch.int32)


def products(
    way: str, threads: int, weight: torch.Tensor, xs: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the products of w8a8 with a weight, in float32.

    A weight in bfloat16 stands on each side of it, so the unit changes its tiles' shapes between
    them, and what it takes for 0.
    """
    with computing_with(way), Pool(threads) as pool:
        other = pack(weight[:5], Kind.BF16, pool)
        product = PackedProduct([other, pack(weight, Kind.W8A8, pool), other])
        return [product.multiply(x, pool, torch.float32)[:, 5:-5] for x in xs]


@pytest.mark.parametrize(("shape", "counts"), CASES, ids=[str(shape) for shape, _ in CASES])
@pytest.mark.parametrize("unit", UNITS)
def test_bytes_on_the_unit_have_the_bits_of_vnni(
    unit: str, shape: tuple[int, int], counts: tuple[int, ...]
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])) * 0.02
    x = activations(max(counts), shape[1])
    expected, same = [bits(*products(way, 1, weight, [x])) for way in VECTORS]
    assert torch.equal(expected, same)
    assert expected[3].all()
    for threads in (1, 2, 3):
        for y in products(unit, threads, weight, [x[:count] for count in counts]):
            assert torch.equal(bits(y), expected[: len(y)])


def test_each_format_has_its_own_instruction() -> None:
    found = tile_functions(build(["avx512_bf16"]))
    codes = {name: code for name, code in found.items() if "AmxUnit" in name}
    of_bytes = {name for name in codes if "RoundedWeights" in name}
    assert len(of_bytes) == 6
    assert {name for name, code in codes.items() if "tdpbsud" in code} == of_bytes
    assert {name for name, code in codes.items() if "tdpbf16ps" in code} == {*codes} - of_bytes
