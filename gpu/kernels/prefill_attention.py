"""Launches ``prefill_attention.cu``: causal attention of rows of several tokens, paged keys."""

from __future__ import annotations

import torch

from gpu.attention.prefill_items import ITEM_FIELDS
from gpu.kernels import KernelLoader, KernelSource, parameters
from gpu.kernels.attention_tile import NO_WINDOW, TiledKernel, tile_source, variants

__all__ = ["VARIANTS", "PrefillAttention", "prefill_attention_source"]

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


def prefill_attention_source(
    *, dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, tile: int
) -> KernelSource:
    """The kernel for one type of model and cache, size of head and tile of 64 or 128 queries."""
    return tile_source(
        "prefill_attention",
        PARAMETERS,
        ITEM_FIELDS,
        dtype=dtype,
        cache_dtype=cache_dtype,
        head_dim=head_dim,
        tile=tile,
    )


VARIANTS = variants(prefill_attention_source)


class PrefillAttention:
    """Attention of one model's prefill rows: ``prepare`` once a step, ``launch`` once a layer.

    The work items come from :func:`gpu.attention.prefill_items.prefill_items`, made for the same
    ``tokens_per_tile``. Both tiles give the same results up to rounding; that of 64 packed queries
    is for steps of short rows (:func:`gpu.attention.prefill_items.choose_tile`).

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
        tile: int = 128,
    ) -> None:
        self._tiled = TiledKernel(
            loader,
            prefill_attention_source,
            dtype=dtype,
            cache_dtype=cache_dtype,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            softmax_scale=softmax_scale,
            tile=tile,
        )
        self.tokens_per_tile = self._tiled.tokens_per_tile
        """How many tokens an item covers at most."""
        self._num_items = 0

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
        fields = self._tiled.fields
        fields["items"] = items.data_ptr()
        fields["query_start"] = query_start.data_ptr()
        fields["context_lens"] = context_lens.data_ptr()
        fields["slots"] = slots.data_ptr()
        fields["block_tables"] = block_tables.data_ptr()
        fields["table_stride"] = block_tables.stride(0)
        if partial_start is not None and partial_out is not None and partial_lse is not None:
            fields["partial_start"] = partial_start.data_ptr()
            fields["partial_out"] = partial_out.data_ptr()
            fields["partial_lse"] = partial_lse.data_ptr()
        self._num_items = num_items
        # The kernel only knows addresses: what they belong to must live until the next step.
        self._kept = (items, query_start, context_lens, slots, block_tables)
        self._kept_partials = (partial_start, partial_out, partial_lse)

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
        self._tiled.fields["out"] = out.data_ptr()
        self._tiled.fields["window"] = window or NO_WINDOW
        self._tiled.launch(self._num_items, q, k_cache, v_cache, k_scale, v_scale)
