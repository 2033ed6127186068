"""The attention interface: what a model needs of a backend, and nothing of how it is done.

A backend owns the paged KV cache and the table of rotary angles. Once a step,
:meth:`Attention.begin` gives it the step's layout; then each layer calls
:meth:`Attention.rope_and_write` and :meth:`Attention.attend`.

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
    """The paged KV cache: for each layer ``num_pages`` pages of ``page_size`` tokens."""

    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all layers, keys and values."""
        per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return per_token * self.page_size


@attrs.frozen(kw_only=True)
class StepLayout:
    """The R rows of one step, on the host. T tokens stand row after row.

    Row i's queries are tokens ``query_start[i]:query_start[i+1]``, at positions
    ``context_lens[i] - (query_start[i+1] - query_start[i])`` up to ``context_lens[i] - 1`` of
    their sequence; its keys are all positions below ``context_lens[i]`` (causally), found through
    the page ids ``block_tables[i]`` (entries past the last page used are any page).

    Rows of one token come first, longest context first: a backend that computes them together then
    has neighbours of like length, and one that spreads them out starts the long ones early.
    """

    positions: npt.NDArray[np.int64]  # [T]
    query_start: npt.NDArray[np.int64]  # [R + 1], the first 0, the last T
    context_lens: npt.NDArray[np.int64]  # [R]
    slots: npt.NDArray[np.int64]  # [R], the slot of each row's sequence
    block_tables: npt.NDArray[np.int32]  # [R, max pages]
    num_decode_rows: int
    """The first so many rows have exactly one token each, the others more."""


@attrs.frozen(eq=False)
class QkNorm:
    """A norm of each head of the queries and the keys: x * weight / sqrt(mean(x^2) + eps)."""

    weight: torch.Tensor  # [num_heads + num_kv_heads, head_dim] of the model's dtype, contiguous
    eps: float


class Attention(Protocol):
    """Paged attention over one model's cache. Every method works on the current device stream."""

    def copy_pages(self, copies: Copies) -> None:
        """Copy pages, all layers of each, one after the other."""

    def begin(self, layout: StepLayout) -> None:
        """Prepare for the layers of one step (masks, gather indices, kernel parameters)."""

    def rope_and_write(
        self, layer: int, qkv: torch.Tensor, rotate: bool, qk_norm: QkNorm | None = None
    ) -> torch.Tensor:
        """Norm (if ``qk_norm``) and rotate (if ``rotate``) queries and keys; write keys and values.

        ``qkv`` is [T, num_heads + 2 * num_kv_heads, head_dim]: the heads of the queries, then those
        of the keys, then those of the values; it may be overwritten. Returns the queries,
        [T, num_heads, head_dim].
        """

    def attend(self, layer: int, q: torch.Tensor, window: int | None) -> torch.Tensor:
        """Causal attention of every row's queries over its own keys.

        With a ``window`` a query sees that many positions, its own included. Returns a contiguous
        tensor of [T, num_heads, head_dim].
        """
