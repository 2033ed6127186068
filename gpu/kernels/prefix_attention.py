"""Launches ``prefix_attention.cu``: decode rows attend together to the prefix that they share."""

from __future__ import annotations

import torch

from gpu.attention.shared_prefix import ITEM_FIELDS
from gpu.kernels import KernelLoader, KernelSource, parameters
from gpu.kernels.attention_tile import TiledKernel, tile_source, variants

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
    return tile_source(
        "prefix_attention",
        PARAMETERS,
        ITEM_FIELDS,
        dtype=dtype,
        cache_dtype=cache_dtype,
        head_dim=head_dim,
        tile=tile,
    )


VARIANTS = variants(prefix_attention_source)


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
        self._tiled = TiledKernel(
            loader,
            prefix_attention_source,
            dtype=dtype,
            cache_dtype=cache_dtype,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            softmax_scale=softmax_scale,
            tile=tile,
        )
        self.rows_per_tile = self._tiled.tokens_per_tile
        """How many rows an item covers at most."""
        self._num_items = 0

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
        fields = self._tiled.fields
        fields["items"] = items.data_ptr()
        fields["num_items"] = num_items.data_ptr()
        fields["members"] = members.data_ptr()
        fields["slots"] = slots.data_ptr()
        fields["block_tables"] = block_tables.data_ptr()
        fields["table_stride"] = block_tables.stride(0)
        fields["partial_start"] = partial_start.data_ptr()
        fields["partial_out"] = partial_out.data_ptr()
        fields["partial_lse"] = partial_lse.data_ptr()
        self._num_items = items.shape[0]
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
        self._tiled.launch(self._num_items, q, k_cache, v_cache, k_scale, v_scale)
