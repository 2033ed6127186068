"""Launches ``decode_attention.cu``: paged attention of one query token for each row of a batch.

A launcher belongs to one model (and one sliding window, if layers differ in it)::

    decode = DecodeAttention(loader, num_heads=32, num_kv_heads=8, ...)
    # Once for each set of buffers; a CUDA graph keeps what it was captured with.
    decode.prepare(slots=..., block_tables=..., items=..., num_items=..., partial_out=...,
                   partial_lse=...)
    # Once a step: :func:`gpu.attention.splits.split` to items, copied to those buffers.
    decode.launch(q, k_cache, v_cache, out)  # once a layer

Rows that were split need :class:`gpu.kernels.combine_partials.CombinePartials` after it.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from gpu.kernels import MOST_BLOCKS, KernelLoader, KernelSource, element_name, parameters
from gpu.kernels.attention_tile import DTYPES, HEAD_DIMS, check_attention_arguments
from gpu.kernels.combine_partials import check_partials

BLOCKS_PER_MULTIPROCESSOR = 3
"""Blocks that share a multiprocessor's registers and 228 KB of shared memory (H100, H200, B200).

With less shared memory fewer blocks fit: two on an A100, one on consumer cards.
"""

_TILE = 16  # positions
_SHARED_BYTES = 74 * 1024  # at most: three blocks, and 1 KB of the system's for each, fit

_PARAMETERS = parameters(
    ("q", "u8"),
    ("k_cache", "u8"),
    ("v_cache", "u8"),
    ("k_scale", "u8"),
    ("v_scale", "u8"),
    ("block_tables", "u8"),
    ("slots", "u8"),
    ("items", "u8"),
    ("num_items", "u8"),
    ("out", "u8"),
    ("partial_out", "u8"),
    ("partial_lse", "u8"),
    ("q_stride", "i8"),
    ("table_stride", "i4"),
    ("num_heads", "i4"),
    ("group", "i4"),
    ("page_shift", "i4"),
    ("scale_log2", "f4"),
)


def source(head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> KernelSource:
    """Return the kernel for a head size, a model's dtype and a cache's (the model's or e4m3)."""
    # The accumulators of the largest heads leave registers for half as many threads, and none for
    # the queries.
    num_warps, query_bytes = (4, 0) if head_dim <= 128 else (2, head_dim // 16 * 512)
    scale_bytes = 4 if cache_dtype.itemsize == 1 else 0
    stage_bytes = 2 * _TILE * (head_dim * cache_dtype.itemsize + scale_bytes)
    stages = (_SHARED_BYTES - query_bytes) // (num_warps * stage_bytes)
    shared_bytes = num_warps * stages * stage_bytes + query_bytes
    return KernelSource(
        name="decode_attention",
        parameters=_PARAMETERS,
        num_threads=32 * num_warps,
        defines=(
            ("HEAD_DIM", head_dim),
            ("TYPE", element_name(dtype)),
            ("CACHE", element_name(cache_dtype)),
            ("STAGES", stages),
            ("SHARED_BYTES", shared_bytes),
        ),
        shared_bytes=shared_bytes,
    )


VARIANTS = [
    source(head_dim, dtype, cache_dtype)
    for head_dim in HEAD_DIMS
    for dtype in DTYPES
    for cache_dtype in (dtype, torch.float8_e4m3fn)
]


class DecodeAttention:
    """Attention of one query for each row over work items; see the kernel for the layouts.

    ``scale`` multiplies the scores, usually ``head_dim**-0.5``. The cache's dtype is that of the
    model or ``float8_e4m3fn``, which goes with a scale for each token and KV head.

    Raises:
        ValueError: the kernel doesn't exist for these choices.
    """

    def __init__(
        self,
        loader: KernelLoader,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        dtype: torch.dtype,
        cache_dtype: torch.dtype,
        scale: float,
    ) -> None:
        check_attention_arguments(
            dtype=dtype,
            cache_dtype=cache_dtype,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
        )
        self.kernel = loader.load(source(head_dim, dtype, cache_dtype))
        self.target_items = max(
            1, loader.num_multiprocessors * BLOCKS_PER_MULTIPROCESSOR // num_kv_heads
        )
        """Number of items that fill the GPU once, the aim of :mod:`gpu.attention.splits`."""
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        self._grid = (0, 0, 0)
        self._parameters = np.zeros(1, _PARAMETERS)
        self._parameters["num_heads"] = num_heads
        self._parameters["group"] = num_heads // num_kv_heads
        self._parameters["page_shift"] = page_size.bit_length() - 1
        self._parameters["scale_log2"] = scale * math.log2(math.e)

    def prepare(
        self,
        *,
        slots: torch.Tensor,
        block_tables: torch.Tensor,
        items: torch.Tensor,
        num_items: torch.Tensor,
        partial_out: torch.Tensor,
        partial_lse: torch.Tensor,
        max_blocks: int | None = None,
    ) -> None:
        """Set the buffers of the launches that follow. All are read when the kernel runs.

        ``slots`` int32 [rows]; ``block_tables`` int32 [num_slots, table_stride]; ``items`` int32
        [max_items, 4]; ``num_items`` int32 [1]; ``partial_out`` float32 [max_partials, num_heads,
        head_dim]; ``partial_lse`` float32 [max_partials, num_heads].

        The grid has a block for each KV head and each of ``max_items``, or of ``max_blocks`` or
        what a grid may have if that is less: blocks then take several items in turn.

        Raises:
            ValueError: a buffer of another dtype, shape or alignment.
        """
        for name, tensor, dims in (
            ("slots", slots, 1),
            ("block_tables", block_tables, 2),
            ("items", items, 2),
            ("num_items", num_items, 1),
        ):
            if tensor.dtype != torch.int32 or tensor.dim() != dims or not tensor.is_contiguous():
                raise ValueError(f"{name} must be a contiguous int32 tensor of {dims} dimensions")
        if items.shape[1] != 4 or items.data_ptr() % 16:
            raise ValueError("items must be [max_items, 4] and aligned to 16 bytes")
        check_partials(partial_out, partial_lse, self._num_heads, self._head_dim)
        into = self._parameters
        into["slots"] = slots.data_ptr()
        into["block_tables"] = block_tables.data_ptr()
        into["table_stride"] = block_tables.shape[1]
        into["items"] = items.data_ptr()
        into["num_items"] = num_items.data_ptr()
        into["partial_out"] = partial_out.data_ptr()
        into["partial_lse"] = partial_lse.data_ptr()
        blocks = min(items.shape[0], MOST_BLOCKS[1])
        if max_blocks is not None:
            blocks = min(blocks, max_blocks)
        self._grid = (self._num_kv_heads, blocks, 1)
        # The kernel has only addresses: what they belong to must live until the next step.
        self._kept = (slots, block_tables, items, num_items, partial_out, partial_lse)

    def launch(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None:
        """Attention of one layer, on torch's current stream, into ``out`` and the partials.

        ``q`` [rows, num_heads, head_dim], the heads of a row contiguous; ``k_cache`` and
        ``v_cache`` [num_pages, num_kv_heads, page_size, head_dim]; ``out`` [rows, num_heads,
        head_dim]; ``k_scale`` and ``v_scale`` [num_pages, num_kv_heads, page_size] float32 for an
        e4m3 cache. Only a row with a single item, which has no partial, gets its ``out`` here.
        """
        into = self._parameters
        into["q"] = q.data_ptr()
        into["q_stride"] = q.stride(0)
        into["k_cache"] = k_cache.data_ptr()
        into["v_cache"] = v_cache.data_ptr()
        into["out"] = out.data_ptr()
        if k_scale is not None and v_scale is not None:
            into["k_scale"] = k_scale.data_ptr()
            into["v_scale"] = v_scale.data_ptr()
        self.kernel.launch(self._grid, into)
