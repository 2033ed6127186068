"""Memory for kernels under test: it ends at an inaccessible page and starts out as NaN.

On the CPU a kernel that reads or writes past the end of a tensor from here is killed by the
operating system, and one that uses unwritten memory gives NaN. On a GPU the memory is torch's own,
poisoned likewise.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence

import torch

from gpu.kernels import KernelLoader

__all__ = ["place", "poisoned", "poisoned_cache", "relative_error"]

_PAGE = mmap.PAGESIZE
_ALIGNMENT = 16
_POISON = 0xFF
_PROT_NONE = 0
_libc = ctypes.CDLL(None, use_errno=True)


def place(tensor: torch.Tensor, loader: KernelLoader) -> torch.Tensor:
    """Return a contiguous copy of ``tensor`` where the kernels of ``loader`` run.

    On the CPU the byte after its last one (rounded up to 16 bytes) is on an inaccessible page.
    """
    copy = poisoned(tuple(tensor.shape), tensor.dtype, loader)
    copy.copy_(tensor)
    return copy


def poisoned(shape: Sequence[int], dtype: torch.dtype, loader: KernelLoader) -> torch.Tensor:
    """Return a new tensor full of 0xFF bytes: NaN in every floating-point type, -1 in integers.

    It is guarded like that of :func:`place`.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if loader.device.type == "cpu":
        flat = _guarded_bytes(num_bytes)
    else:
        flat = torch.full((num_bytes,), _POISON, dtype=torch.uint8, device=loader.device)
    return flat.view(dtype).view(tuple(shape))


def poisoned_cache(
    *,
    num_pages: int,
    num_kv_heads: int,
    page_size: int,
    head_dim: int,
    dtype: torch.dtype,
    loader: KernelLoader,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values, each [num_pages, num_kv_heads, page_size, head_dim], all NaN."""
    shape = (num_pages, num_kv_heads, page_size, head_dim)
    return poisoned(shape, dtype, loader), poisoned(shape, dtype, loader)


def relative_error(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """``|actual - reference| / |reference|`` in float64; infinite if ``actual`` holds a NaN.

    Where the reference is all zeros, the norm of ``actual``.
    """
    actual, reference = actual.detach().double().cpu(), reference.detach().double().cpu()
    assert actual.shape == reference.shape, (actual.shape, reference.shape)
    assert not reference.isnan().any(), "the reference holds a NaN"
    if actual.isnan().any():
        return math.inf
    difference, size = (actual - reference).norm().item(), reference.norm().item()
    return difference / size if size else difference


def _guarded_bytes(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes] between two inaccessible pages, flush with the second one."""
    usable = max(1, -(-num_bytes // _PAGE)) * _PAGE
    memory = mmap.mmap(-1, usable + 2 * _PAGE)
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.memset(first, _POISON, usable + 2 * _PAGE)
    for guard in (first, first + _PAGE + usable):
        if _libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(_PAGE), _PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
    start = _PAGE + usable - -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
    # The tensor keeps the mapping alive.
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[start : start + num_bytes]
