"""Launches ``prefix_attention.cu``: decode rows attend together to the prefix that they share."""

from __future__ import annotations

import math

import numpy as np
import torch

from gpu.attention.shared_prefix import ITEM_FIELDS
from gpu.kernels import KernelLoader, KernelSource, parameters
from gpu.kernels.attention_tile import (
    DTYPES,
    HEAD_DIMS,
    TILES,
    check_attention_arguments,
    tile_options,
    tokens_per_tile,
)

__all__ = ["VARIANTS", "PrefixAttention", "prefix_attention_source"]

PARAMETERS = parameters(
    ("q", "u8"),
    ("k_cache", "u8"),
    ("v_cache", "u8"),
    ("k_scale", "u8"),
    ("v_scale", "u8"),
    ("partial_out", "u8"),
    ("partial_lse", "u8"),
    ("items", "u8"),
    ("num_items", "u8"),
    ("members", "u8"),
    ("slots", "u8"),
    ("block_tables", "u8"),
    ("partial_start", "u8"),
    ("q_stride", "i4"),
    ("group", "i4"),
    ("num_kv_heads", "i4"),
    ("page_shift", "i4"),
    ("table_stride", "i4"),
    ("scale_log2", "f4"),
)


def prefix_attention_source(
    *, dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, tile: int
) -> KernelSource:
    """The kernel for one type of model and cache, size of head and tile of 64 or 128 queries."""
    options = tile_options(dtype=dtype, cache_dtype=cache_dtype, head_dim=head_dim, tile=tile)
    return KernelSource(
        name="prefix_attention",
        parameters=PARAMETERS,
        num_threads=options.num_threads,
        defines=(*options.defines, ("ITEM_FIELDS", ITEM_FIELDS)),
        shared_bytes=options.shared_bytes,
    )


VARIANTS = [
    prefix_attention_source(dtype=dtype, cache_dtype=cache_dtype, head_dim=head_dim, tile=tile)
    for dtype in DTYPES
    for cache_dtype in (dtype, torch.float8_e4m3fn)
    for head_dim in HEAD_DIMS
    for tile in TILES
]


class PrefixAttention:
    """Attention of groups of decode rows to their shared prefixes.

    ``prepare`` sets addresses, which may stay the same for the life of a captured graph; ``launch``
    is called once a layer. Items and members come from
    :func:`gpu.attention.shared_prefix.shared_prefixes`, made for the same ``rows_per_tile``.

    Raises:
        ValueError: the shape is none that the kernel is built for.
    """

    def __init__(
        self,
        loader: KernelLoader,
        *,
        dtype: torch.dtype,
        cache_dtype: torch.dtype,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        softmax_scale: float,
        tile: int = 64,
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
        self.rows_per_tile = tokens_per_tile(tile, num_heads // num_kv_heads)
        """How many rows an item covers at most."""
        source = prefix_attention_source(
            dtype=dtype, cache_dtype=cache_dtype, head_dim=head_dim, tile=tile
        )
        self._kernel = loader.load(source)
        self._grid = (num_kv_heads, 0, 1)
        self._parameters = np.zeros(1, PARAMETERS)
        self._fields = self._parameters[0]
        self._fields["group"] = num_heads // num_kv_heads
        self._fields["num_kv_heads"] = num_kv_heads
        self._fields["page_shift"] = page_size.bit_length() - 1
        self._fields["scale_log2"] = softmax_scale * math.log2(math.e)

    def prepare(
        self,
        *,
        items: torch.Tensor,
        num_items: torch.Tensor,
        members: torch.Tensor,
        slots: torch.Tensor,
        block_tables: torch.Tensor,
        partial_start: torch.Tensor,
        partial_out: torch.Tensor,
        partial_lse: torch.Tensor,
    ) -> None:
        """Set where the work of a step is found. All tensors are contiguous, on the device.

        Args:
            items: int32 [max_items, 5]; ``max_items`` is the bound that the grid is fixed to.
            num_items: int32 [1], how many of them are this step's.
            members: int32, the row indices that the items refer to.
            slots: int32 [rows].
            block_tables: int32 [num_slots, table_stride].
            partial_start: int32 [rows + 1].
            partial_out: float32 [num_partials, num_heads, head_dim].
            partial_lse: float32 [num_partials, num_heads].
        """
        fields = self._fields
        fields["items"] = items.data_ptr()
        fields["num_items"] = num_items.data_ptr()
        fields["members"] = members.data_ptr()
        fields["slots"] = slots.data_ptr()
        fields["block_tables"] = block_tables.data_ptr()
        fields["table_stride"] = block_tables.stride(0)
        fields["partial_start"] = partial_start.data_ptr()
        fields["partial_out"] = partial_out.data_ptr()
        fields["partial_lse"] = partial_lse.data_ptr()
        self._grid = (self._grid[0], items.shape[0], 1)
        # The kernel only knows addresses: what they belong to must live until they are replaced.
        self._kept = (items, num_items, members, slots, block_tables)
        self._kept_partials = (partial_start, partial_out, partial_lse)

    def launch(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None:
        """Attend in one layer: fill the partial results that are reserved for prefixes.

        Args:
            q: [rows, num_heads, head_dim], rotated; heads contiguous, rows at any stride that is a
                multiple of 8 elements.
            k_cache, v_cache: [num_pages, num_kv_heads, page_size, head_dim].
            k_scale, v_scale: float32 [num_pages, num_kv_heads, page_size]; e4m3 cache only.
        """
        fields = self._fields
        fields["q"] = q.data_ptr()
        fields["q_stride"] = q.stride(0)
        fields["k_cache"] = k_cache.data_ptr()
        fields["v_cache"] = v_cache.data_ptr()
        if k_scale is not None and v_scale is not None:
            fields["k_scale"] = k_scale.data_ptr()
            fields["v_scale"] = v_scale.data_ptr()
        self._kernel.launch(self._grid, self._parameters)
