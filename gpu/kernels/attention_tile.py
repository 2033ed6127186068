"""What the kernels on ``attention_tile.cuh`` have in common: compile-time choices, launches."""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs
import numpy as np
import torch

from gpu.kernels import KernelLoader, KernelSource, element_name

__all__ = [
    "DTYPES",
    "HEAD_DIMS",
    "NO_WINDOW",
    "TILES",
    "TileOptions",
    "TiledKernel",
    "check_attention_arguments",
    "keys_per_tile",
    "tile_options",
    "tile_source",
    "tokens_per_tile",
    "variants",
]

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
    """What a ``KernelSource`` needs: see ``attention_tile.cuh`` for the meaning of each."""

    num_threads: int
    shared_bytes: int
    defines: tuple[tuple[str, str | int], ...]


def tokens_per_tile(tile: int, group: int) -> int:
    """How many tokens a tile of ``tile`` packed queries holds: whole ones only."""
    return tile // group


def keys_per_tile(head_dim: int) -> int:
    """Keys of a tile: fewer for the largest heads, whose output fills the registers."""
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


def tile_source(
    name: str,
    parameters: np.dtype[np.void],
    item_fields: int,
    *,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    head_dim: int,
    tile: int,
) -> KernelSource:
    """The kernel ``name`` for one type of model and cache, size of head and tile of queries."""
    options = tile_options(dtype=dtype, cache_dtype=cache_dtype, head_dim=head_dim, tile=tile)
    return KernelSource(
        name=name,
        parameters=parameters,
        num_threads=options.num_threads,
        defines=(*options.defines, ("ITEM_FIELDS", item_fields)),
        shared_bytes=options.shared_bytes,
    )


def variants(make_source: Callable[..., KernelSource]) -> list[KernelSource]:
    """``make_source`` for all that can be asked for."""
    return [
        make_source(dtype=dtype, cache_dtype=cache_dtype, head_dim=head_dim, tile=tile)
        for dtype in DTYPES
        for cache_dtype in (dtype, torch.float8_e4m3fn)
        for head_dim in HEAD_DIMS
        for tile in TILES
    ]


class TiledKernel:
    """A kernel for one model's shape, with what never changes and what each layer changes.

    Raises:
        ValueError: the shape is none that the kernel is built for.
    """

    def __init__(
        self,
        loader: KernelLoader,
        make_source: Callable[..., KernelSource],
        *,
        dtype: torch.dtype,
        cache_dtype: torch.dtype,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        softmax_scale: float,
        tile: int,
    ) -> None:
        check_attention_arguments(
            dtype=dtype,
            cache_dtype=cache_dtype,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
        )
        if tile not in TILES:
            raise ValueError(f"tile is {tile}; it must be one of {TILES}")
        source = make_source(dtype=dtype, cache_dtype=cache_dtype, head_dim=head_dim, tile=tile)
        self.tokens_per_tile = tokens_per_tile(tile, num_heads // num_kv_heads)
        self.num_kv_heads = num_kv_heads
        self._kernel = loader.load(source)
        self._parameters = np.zeros(1, source.parameters)
        self.fields = self._parameters[0]
        """The kernel's ``struct Parameters``, to be filled by name."""
        self.fields["group"] = num_heads // num_kv_heads
        self.fields["num_kv_heads"] = num_kv_heads
        self.fields["page_shift"] = page_size.bit_length() - 1
        self.fields["scale_log2"] = softmax_scale * math.log2(math.e)

    def launch(
        self,
        num_items: int,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
    ) -> None:
        """Launch over ``num_items`` work items with one layer's queries and cache."""
        fields = self.fields
        fields["q"] = q.data_ptr()
        fields["q_stride"] = q.stride(0)
        fields["k_cache"] = k_cache.data_ptr()
        fields["v_cache"] = v_cache.data_ptr()
        if k_scale is not None and v_scale is not None:
            fields["k_scale"] = k_scale.data_ptr()
            fields["v_scale"] = v_scale.data_ptr()
        self._kernel.launch((self.num_kv_heads, num_items, 1), self._parameters)
