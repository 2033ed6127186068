"""Launches ``tiled_attention.cu``: prefill rows, and decode rows over a prefix that they share."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import torch

from gpu.attention.prefill_items import ITEM_FIELDS
from gpu.kernels import KernelLoader, KernelSource, parameters
from gpu.kernels.attention_tile import (
    DTYPES,
    HEAD_DIMS,
    NO_WINDOW,
    TILES,
    check_attention_arguments,
    tile_options,
    tokens_per_tile,
)

PARAMETERS = parameters(
    ("q", "u8"),
    ("k_cache", "u8"),
    ("v_cache", "u8"),
    ("k_scale", "u8"),
    ("v_scale", "u8"),
    ("out", "u8"),
    ("partial_out", "u8"),
    ("partial_lse", "u8"),
    ("items", "u8"),
    ("num_items", "u8"),
    ("members", "u8"),
    ("query_start", "u8"),
    ("context_lens", "u8"),
    ("slots", "u8"),
    ("block_tables", "u8"),
    ("partial_start", "u8"),
    ("q_stride", "i4"),
    ("group", "i4"),
    ("num_kv_heads", "i4"),
    ("page_shift", "i4"),
    ("table_stride", "i4"),
    ("window", "i4"),
    ("scale_log2", "f4"),
)


def tiled_attention_source(
    *,
    shared_prefix: bool,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    head_dim: int,
    tile: int,
) -> KernelSource:
    """Return ``prefix_attention`` if ``shared_prefix``, else ``prefill_attention``.

    Args:
        shared_prefix: for decode rows over their shared prefix.
        dtype: of the model.
        cache_dtype: of keys and values.
        head_dim: elements of a head.
        tile: packed queries of a block, 64 or 128.
    """
    options = tile_options(dtype=dtype, cache_dtype=cache_dtype, head_dim=head_dim, tile=tile)
    return KernelSource(
        name="prefix_attention" if shared_prefix else "prefill_attention",
        file="tiled_attention.cu",
        parameters=PARAMETERS,
        num_threads=options.num_threads,
        defines=(
            ("SHARED_PREFIX", int(shared_prefix)),
            *options.defines,
            ("ITEM_FIELDS", ITEM_FIELDS),
        ),
        shared_bytes=options.shared_bytes,
    )


VARIANTS = [
    tiled_attention_source(
        shared_prefix=shared_prefix,
        dtype=dtype,
        cache_dtype=cache_dtype,
        head_dim=head_dim,
        tile=tile,
    )
    for shared_prefix in (False, True)
    for dtype in DTYPES
    for cache_dtype in (dtype, torch.float8_e4m3fn)
    for head_dim in HEAD_DIMS
    for tile in TILES
]


class _TiledAttention:
    """One of the two kernels for one model's shape.

    Raises:
        ValueError: the shape is none that the kernel is built for.
    """

    _shared_prefix: ClassVar[bool]

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
        source = tiled_attention_source(
            shared_prefix=self._shared_prefix,
            dtype=dtype,
            cache_dtype=cache_dtype,
            head_dim=head_dim,
            tile=tile,
        )
        self.tokens_per_tile = tokens_per_tile(tile, num_heads // num_kv_heads)
        """Tokens that an item covers at most."""
        self._num_kv_heads = num_kv_heads
        self._kernel = loader.load(source)
        self._parameters = np.zeros(1, source.parameters)
        self._fields = self._parameters[0]
        self._fields["group"] = num_heads // num_kv_heads
        self._fields["num_kv_heads"] = num_kv_heads
        self._fields["page_shift"] = page_size.bit_length() - 1
        self._fields["scale_log2"] = softmax_scale * math.log2(math.e)
        self._grid_items = 0

    def _prepare(
        self, *, grid_items: int, block_tables: torch.Tensor, **tensors: torch.Tensor | None
    ) -> None:
        """Set the grid, and by their names the tensors that are the same for all layers."""
        self._grid_items = grid_items
        self._fields["table_stride"] = block_tables.stride(0)
        # The kernel only knows addresses: what they belong to must live until they are replaced.
        self._kept = {"block_tables": block_tables, **tensors}
        for name, tensor in self._kept.items():
            if tensor is not None:
                self._fields[name] = tensor.data_ptr()

    def _launch(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
    ) -> None:
        fields = self._fields
        fields["q"] = q.data_ptr()
        fields["q_stride"] = q.stride(0)
        fields["k_cache"] = k_cache.data_ptr()
        fields["v_cache"] = v_cache.data_ptr()
        if k_scale is not None and v_scale is not None:
            fields["k_scale"] = k_scale.data_ptr()
            fields["v_scale"] = v_scale.data_ptr()
        self._kernel.launch((self._num_kv_heads, self._grid_items, 1), self._parameters)


class PrefillAttention(_TiledAttention):
    """Attention of one model's prefill rows: ``prepare`` once a step, ``launch`` once a layer.

    The work items come from :func:`gpu.attention.prefill_items.prefill_items`, made for the same
    ``tokens_per_tile``. Both tiles give the same results up to rounding; that of 64 packed queries
    is for steps of short rows (:func:`gpu.attention.prefill_items.choose_tile`).
    """

    _shared_prefix = False

    def prepare(
        self,
        *,
        items: torch.Tensor,
        num_items: int,
        query_start: torch.Tensor,
        context_lens: torch.Tensor,
        slots: torch.Tensor,
        block_tables: torch.Tensor,
        partial_start: torch.Tensor | None = None,
        partial_out: torch.Tensor | None = None,
        partial_lse: torch.Tensor | None = None,
    ) -> None:
        """Set what holds for all layers of a step. All tensors are contiguous, on the device.

        Args:
            items: int32 [at least num_items, 5].
            num_items: how many of them are this step's.
            query_start: int32 [rows + 1], the index of each row's first token in ``q`` and ``out``.
            context_lens: int32 [rows].
            slots: int32 [rows].
            block_tables: int32 [num_slots, table_stride].
            partial_start: int32 [tokens + 1], indexed like ``q``; needed, as the next two, if an
                item has a split.
            partial_out: float32 [num_partials, num_heads, head_dim].
            partial_lse: float32 [num_partials, num_heads].
        """
        self._prepare(
            grid_items=num_items,
            items=items,
            query_start=query_start,
            context_lens=context_lens,
            slots=slots,
            block_tables=block_tables,
            partial_start=partial_start,
            partial_out=partial_out,
            partial_lse=partial_lse,
        )

    def launch(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        *,
        window: int | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None:
        """Attend in one layer: fill the rows of ``out`` that belong to unsplit items.

        Args:
            q: [tokens, num_heads, head_dim], rotated; heads contiguous, tokens at any stride that
                is a multiple of 8 elements.
            k_cache, v_cache: [num_pages, num_kv_heads, page_size, head_dim], the new tokens' keys
                and values already written.
            out: [tokens, num_heads, head_dim], contiguous.
            window: how many positions a query sees, its own included; None for all.
            k_scale, v_scale: float32 [num_pages, num_kv_heads, page_size]; e4m3 cache only.
        """
        self._fields["out"] = out.data_ptr()
        self._fields["window"] = window or NO_WINDOW
        self._launch(q, k_cache, v_cache, k_scale, v_scale)


class PrefixAttention(_TiledAttention):
    """Attention of groups of decode rows to their shared prefixes.

    ``prepare`` sets addresses, which may stay the same for the life of a captured graph; ``launch``
    is called once a layer. Items and members come from
    :func:`gpu.attention.shared_prefix.shared_prefixes`, made for ``tokens_per_tile`` rows.
    """

    _shared_prefix = True

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
        self._prepare(
            grid_items=items.shape[0],
            items=items,
            num_items=num_items,
            members=members,
            slots=slots,
            block_tables=block_tables,
            partial_start=partial_start,
            partial_out=partial_out,
            partial_lse=partial_lse,
        )

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
        self._launch(q, k_cache, v_cache, k_scale, v_scale)
