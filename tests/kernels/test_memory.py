"""The memory that the kernel tests use: guarded at its end, NaN where it is unwritten."""

from __future__ import annotations

import gc
import math
import subprocess
import sys

import pytest
import torch

from gpu.kernels.emulation import EmulatedLoader
from tests.kernels.memory import place, poisoned, poisoned_cache, relative_error

DTYPES = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (4096,), (0, 4)])
def test_poison_is_nan_and_a_copy_equals_its_source(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    loader = EmulatedLoader()
    assert poisoned(shape, dtype, loader).float().isnan().all()
    source = torch.randn(shape).to(dtype)
    copy = place(source, loader)
    assert copy.dtype == dtype
    assert copy.data_ptr() % 16 == 0
    assert torch.equal(copy.float(), source.float())


def test_a_copy_is_contiguous_and_outlives_its_source() -> None:
    copy = place(torch.arange(12).view(3, 4).T, EmulatedLoader())
    gc.collect()
    assert copy.is_contiguous()
    assert copy.tolist() == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]


def test_a_cache_is_all_nan() -> None:
    keys, values = poisoned_cache(
        num_pages=3,
        num_kv_heads=2,
        page_size=16,
        head_dim=8,
        dtype=torch.bfloat16,
        loader=EmulatedLoader(),
    )
    assert keys.shape == values.shape == (3, 2, 16, 8)
    assert keys.isnan().all()
    assert values.isnan().all()


@pytest.mark.parametrize("size", [1, 4, 1024, 4096])
@pytest.mark.parametrize("access", ["ctypes.string_at(end, 1)", "ctypes.memset(end, 0, 1)"])
def test_a_touch_past_the_end_kills(size: int, access: str) -> None:
    program = (
        "import ctypes, torch\n"
        "from gpu.kernels.emulation import EmulatedLoader\n"
        "from tests.kernels.memory import poisoned\n"
        f"memory = poisoned(({size},), torch.float32, EmulatedLoader())\n"
        "end = memory.data_ptr() + -(-memory.numel() * 4 // 16) * 16\n"
        "ctypes.string_at(end - 16, 16)\n"
        "print('inside', flush=True)\n"
        f"{access}\n"
        "print('outside')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "inside\n"
    assert done.returncode == -11


def test_relative_error() -> None:
    one = torch.tensor([3.0, 4.0])
    assert relative_error(one, one) == 0
    assert relative_error(torch.tensor([3.0, 4.5]), one) == pytest.approx(0.1)
    assert relative_error(torch.tensor([3.0, math.nan]), one) == math.inf
    assert relative_error(torch.tensor([3.0, 4.0]), torch.zeros(2)) == pytest.approx(5)
