"""The paged KV cache of the CUDA kernels: head-major pages, in the model's format or in e4m3."""

from __future__ import annotations

import attrs
import torch

from gpu.attention import CacheShape

__all__ = ["KvCache", "LayerCache", "bytes_per_page"]

FP8 = torch.float8_e4m3fn


@attrs.frozen(kw_only=True)
class LayerCache:
    """One layer's keys and values; the scales of an e4m3 cache, None otherwise."""

    keys: torch.Tensor  # [num_pages, K, page_size, D]
    values: torch.Tensor
    key_scales: torch.Tensor | None  # [num_pages, K, page_size] float32
    value_scales: torch.Tensor | None


class KvCache:
    """The cache of all layers, not initialized: the kernels never use what they didn't write.

    ``shape.dtype`` is the model's, or e4m3 (arXiv:2209.05433) with a float32 scale for each token
    and KV head.
    """

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        pages = (shape.num_layers, 2, shape.num_pages, shape.num_kv_heads, shape.page_size)
        numbers = torch.empty((*pages, shape.head_dim), dtype=shape.dtype, device=shape.device)
        scales = None
        if shape.dtype == FP8:
            scales = torch.empty(pages, dtype=torch.float32, device=shape.device)
        self.layers = [
            LayerCache(
                keys=numbers[layer, 0],
                values=numbers[layer, 1],
                key_scales=None if scales is None else scales[layer, 0],
                value_scales=None if scales is None else scales[layer, 1],
            )
            for layer in range(shape.num_layers)
        ]


def bytes_per_page(shape: CacheShape) -> int:
    """Bytes of one page over all layers, with its scales."""
    if shape.dtype != FP8:
        return shape.bytes_per_page
    scales = 2 * shape.num_layers * shape.num_kv_heads * shape.page_size * 4
    return shape.bytes_per_page + scales
