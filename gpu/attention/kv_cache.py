"""The paged KV cache of the CUDA kernels: head-major pages, in the model's dtype or e4m3.

There may also be pages in host memory, each of them contiguous. That memory is page-locked on a
machine with a GPU, so that copies are queued in a stream and the host doesn't wait for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import torch

from gpu.attention import CacheShape
from gpu.executor import Content, Copies
from trioserve.protocol.errors import ModelLoadError

FP8 = torch.float8_e4m3fn


@attrs.frozen(kw_only=True)
class LayerCache:
    """One layer's keys and values. The scales are None unless the cache is e4m3."""

    keys: torch.Tensor  # [num_pages, K, page_size, D]
    values: torch.Tensor
    key_scales: torch.Tensor | None  # [num_pages, K, page_size] float32
    value_scales: torch.Tensor | None


class KvCache:
    """The KV cache of all layers, uninitialized: kernels read only what they have written.

    ``shape.dtype`` is the model's, or e4m3 (arXiv:2209.05433) with a float32 scale for each token
    and KV head. Pages in host memory have the numbers from ``shape.num_pages`` on.

    Raises:
        ModelLoadError: the host memory can't be page-locked.
    """

    def __init__(self, shape: CacheShape, num_host_pages: int = 0) -> None:
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
        # Bytes, [layers, 2, num_pages, ...] on the device and [num_host_pages, layers, 2, ...].
        self._device = [each.view(torch.uint8) for each in (numbers, scales) if each is not None]
        self._host = [_host_pages(each, num_host_pages) for each in self._device]

    def copy_pages(self, copies: Copies) -> None:
        """Queue copies of pages, one after the other: [C, 2], source and destination."""
        for source, destination in copies.tolist():
            for into, what in zip(self.page(destination), self.page(source), strict=True):
                into.copy_(what, non_blocking=True)

    def page(self, number: int) -> list[torch.Tensor]:
        """Return views of the bytes of one page, [layers, 2, ...] each."""
        on_host = number - self.shape.num_pages
        if on_host >= 0:
            return [each[on_host] for each in self._host]
        return [each[:, :, number] for each in self._device]


def _host_pages(device: torch.Tensor, count: int) -> torch.Tensor:
    """Return host memory for ``count`` pages like those of ``device``, as bytes."""
    layers, both, _, *page = device.shape
    pages = torch.empty((count, layers, both, *page), dtype=torch.uint8)
    if device.is_cuda and pages.numel():
        # torch rounds its page-locked memory up to a power of two, up to twice as much.
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = int(runtime.cudaHostRegister(pages.data_ptr(), pages.numel(), 0))
        if error:
            raise ModelLoadError(
                f"{pages.numel() >> 20} MiB of the host's memory can't be locked for the GPU (CUDA "
                f"error {error}): lower --kv-offloading-bytes, or raise what `ulimit -l` allows"
            )
    return pages


def bytes_per_page(shape: CacheShape) -> int:
    """Return the bytes of one page over all layers, with its scales."""
    if shape.dtype != FP8:
        return shape.bytes_per_page
    scales = 2 * shape.num_layers * shape.num_kv_heads * shape.page_size * 4
    return shape.bytes_per_page + scales


def content_of(page: Sequence[torch.Tensor]) -> Content:
    """Return a copy of the bytes of ``page``, whose parts are uint8: [B] uint8."""
    return np.concatenate([part.reshape(-1).cpu().numpy() for part in page])


def fill(page: Sequence[torch.Tensor], content: Content) -> None:
    """Write what :func:`content_of` has returned to the parts of a page."""
    ends = np.cumsum([part.numel() for part in page])
    if content.shape != (ends[-1],):
        raise ValueError(f"a page has {ends[-1]} bytes, not {content.size}")
    for part, piece in zip(page, np.split(content, ends[:-1]), strict=True):
        part.copy_(torch.from_numpy(piece).view(part.shape))
