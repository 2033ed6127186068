"""The attention interface that a model calls and each backend implements.

A backend owns the paged KV cache and the RoPE table. Each step calls :meth:`Attention.begin` with
its layout; then each layer calls :meth:`Attention.rope_and_write` and :meth:`Attention.attend`.

Imported by ``kernels``, ``models``, ``cpu``, ``cuda`` and ``models.transformers_models``.
"""

from __future__ import annotations

from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt
import torch

from gpu.executor import Copies


@attrs.frozen(kw_only=True)
class CacheShape:
    """The shape of a paged KV cache: ``num_pages`` pages of ``page_size`` tokens in each layer."""

    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page: keys and values of all layers."""
        per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return per_token * self.page_size


@attrs.frozen(kw_only=True)
class StepLayout:
    """The R rows of one step with T tokens, row after row, as arrays on the host.

    Row i's queries are the tokens ``query_start[i]:query_start[i+1]``, the last ones of the first
    ``context_lens[i]`` positions of its sequence. Its keys are these positions, in the pages
    ``block_tables[i]``; entries after the last page used are arbitrary pages.

    Rows of one token come first, longest context first. Neighbours then have similar lengths for
    backends that pad, and long rows start early in backends that run them in parallel.
    """

    positions: npt.NDArray[np.int64]  # [T]
    query_start: npt.NDArray[np.int64]  # [R + 1], the first 0, the last T
    context_lens: npt.NDArray[np.int64]  # [R]
    slots: npt.NDArray[np.int64]  # [R], slot number of each row
    block_tables: npt.NDArray[np.int32]  # [R, max pages]
    num_decode_rows: int
    """Number of rows with one token; the other rows have more."""
    rotary_positions: npt.NDArray[np.int64] | None = None
    """[T, 3], for M-RoPE: time, row and column of each token; None if all are ``positions``."""


@attrs.frozen(eq=False)
class QkNorm:
    """The RMS norm of each query and key head: x * weight / sqrt(mean(x^2) + eps)."""

    weight: torch.Tensor  # [num_heads + num_kv_heads, head_dim] of the model's dtype, contiguous
    eps: float


class Attention(Protocol):
    """Paged attention over one model's cache. Every method works on the current device stream."""

    def copy_pages(self, copies: Copies) -> None:
        """Copy pages in all layers, one after the other: [C, 2], source and destination."""

    def page(self, number: int) -> list[torch.Tensor]:
        """Return views of the bytes of a page in all layers: uint8, any shapes."""
        ...

    def begin(self, layout: StepLayout) -> None:
        """Prepare masks, indices or kernel parameters for all layers of one step."""

    def rope_and_write(
        self, layer: int, qkv: torch.Tensor, rotate: bool, qk_norm: QkNorm | None = None
    ) -> torch.Tensor:
        """Write keys and values to the cache and return the queries, [T, num_heads, head_dim].

        ``qkv`` is [T, num_heads + 2 * num_kv_heads, head_dim]: query heads, key heads, value heads;
        it may be overwritten. Queries and keys are normed first if ``qk_norm`` is given, then
        rotated if ``rotate`` is true.
        """

    def attend(self, layer: int, q: torch.Tensor, window: int | None) -> torch.Tensor:
        """Return the causal attention of each row: contiguous [T, num_heads, head_dim].

        With a ``window`` a query sees that many positions, including its own.
        """
