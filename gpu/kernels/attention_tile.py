"""Compile-time choices of the kernels on ``attention_tile.cuh``, and the shapes that they take."""

from __future__ import annotations

import attrs
import torch

from gpu.kernels import element_name

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 80, 96, 128, 256)
PAGE_SIZES = (16, 32, 64)
TILES = (128, 64)
"""Packed queries of a block."""
MAX_GROUP = 16

NO_WINDOW = 1 << 30
"""A window that no context reaches."""

Q_REGISTERS = 32
"""The fragments of Q stay in registers if a thread needs no more than these."""

KEY_RANGE_BYTES = 64


@attrs.frozen(kw_only=True)
class TileOptions:
    """The macros of a tile for a ``KernelSource``; ``attention_tile.cuh`` explains each."""

    num_threads: int
    shared_bytes: int
    defines: tuple[tuple[str, str | int], ...]


def tokens_per_tile(tile: int, group: int) -> int:
    """Return how many tokens a tile of ``tile`` packed queries holds: whole ones only."""
    return tile // group


def keys_per_tile(head_dim: int) -> int:
    """Keys of a tile: fewer for the largest heads, because their output fills the registers."""
    return 64 if head_dim <= 128 else 32


def tile_options(
    *, dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, tile: int
) -> TileOptions:
    """Warps, shared memory and macros for one type of model and cache, head and tile.

    Up to head_dim 128 four warps have 16 or 32 queries each and at least two blocks share a
    multiprocessor. Above, a warp's output is too large for 32 queries: it has 16. So it has at 128
    with an e4m3 cache, where the scales need registers too.
    """
    quantized = cache_dtype == torch.float8_e4m3fn
    warps = 4 if head_dim + quantized <= 128 else tile // 16
    keys = keys_per_tile(head_dim)
    min_blocks = 2 if warps == 4 else 1
    m_tiles = tile // (16 * warps)
    q_in_registers = m_tiles * head_dim // 16 * 4 <= Q_REGISTERS
    shared_bytes = 0 if q_in_registers else tile * head_dim * 2
    shared_bytes += (1 if quantized else 2) * 2 * keys * head_dim * 2
    if quantized:
        raw_chunks_per_warp = keys // warps * head_dim // 16
        shared_bytes += 2 * -(-raw_chunks_per_warp // 32) * 32 * warps * 16
        shared_bytes += 2 * 2 * keys * 4
    shared_bytes += KEY_RANGE_BYTES
    defines = (
        ("TYPE", element_name(dtype)),
        ("CACHE", element_name(cache_dtype)),
        ("HEAD_DIM", head_dim),
        ("TILE", tile),
        ("KEYS", keys),
        ("MIN_BLOCKS", min_blocks),
        ("Q_REGISTERS", Q_REGISTERS),
        ("SHARED_BYTES", shared_bytes),
    )
    return TileOptions(num_threads=32 * warps, shared_bytes=shared_bytes, defines=defines)


def check_attention_arguments(
    *,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
) -> None:
    """Check the shape of a model's attention against what the kernels are built for.

    Raises:
        ValueError: one of them is none of those; the message says which and what may be.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype}; it must be one of {DTYPES}")
    if cache_dtype not in (dtype, torch.float8_e4m3fn):
        raise ValueError(f"cache_dtype is {cache_dtype}; it must be {dtype} or float8_e4m3fn")
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim is {head_dim}; it must be one of {HEAD_DIMS}")
    if page_size not in PAGE_SIZES:
        raise ValueError(f"page_size is {page_size}; it must be one of {PAGE_SIZES}")
    if num_heads % num_kv_heads or not 1 <= num_heads // num_kv_heads <= MAX_GROUP:
        raise ValueError(
            f"{num_heads} query heads over {num_kv_heads} kv heads: 1 to {MAX_GROUP} query heads "
            "must share each kv head"
        )
