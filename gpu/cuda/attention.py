"""Paged attention with the CUDA kernels, on a GPU or in the emulation.

A step is packed on the host (:mod:`gpu.cuda.attention_packing`) and launched on the device. Rows of
one token are computed by ``decode_attention``, the prefix that several of them share by
``prefix_attention``, rows of more tokens by ``prefill_attention``. Where a row was cut, these leave
partial results, which ``combine_partials`` merges for all tokens at once.
"""

from __future__ import annotations

import math
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from gpu.attention import QkNorm, StepLayout
from gpu.attention.kv_cache import KvCache
from gpu.attention.prefill_items import ITEM_FIELDS
from gpu.attention.shared_prefix import SharedPrefixes
from gpu.cuda.attention_limits import AttentionLimits
from gpu.cuda.attention_packing import StepPacker, StepShape, padded_shape
from gpu.cuda.rotary_rows import RotaryRows
from gpu.cuda.step_buffer import StepBuffer
from gpu.executor import Copies
from gpu.kernels import KernelLoader
from gpu.kernels.attention_tile import TILES
from gpu.kernels.combine_partials import CombinePartials
from gpu.kernels.decode_attention import DecodeAttention
from gpu.kernels.rope_and_write import RopeAndWrite
from gpu.kernels.tiled_attention import PrefillAttention, PrefixAttention


@attrs.frozen(kw_only=True)
class _Window:
    """The launches of the layers with one window, which have parameters of their own."""

    index: int
    size: int | None
    decode: DecodeAttention
    prefills: dict[int, PrefillAttention]
    """By their tile."""
    combine: CombinePartials


class CudaAttention:
    """:class:`gpu.attention.Attention` over ``cache`` for a model in bfloat16 or float16.

    :meth:`begin` packs a step into the step buffer and sets its launches; the upload, which
    must come before the first layer, is the caller's. A captured step is set by
    :meth:`begin_padded` once, and packed by :meth:`find_shared` and :meth:`pack_padded` each time.

    Args:
        loader: where the kernels run.
        buffer: the step buffer, with the regions of ``limits``.
        block_tables: int32 [num_slots, table_stride] on the device.
        cache: the KV cache.
        limits: of the steps.
        dtype: of the model.
        cos_sin: the table, as in :class:`~gpu.cuda.rotary_rows.RotaryRows`.
        axes: as there.

    Raises:
        ValueError: the kernels aren't built for the model's shape.
    """

    def __init__(
        self,
        loader: KernelLoader,
        *,
        buffer: StepBuffer,
        block_tables: torch.Tensor,
        cache: KvCache,
        limits: AttentionLimits,
        dtype: torch.dtype,
        cos_sin: torch.Tensor,
        axes: npt.NDArray[np.int64] | None = None,
    ) -> None:
        shape = cache.shape
        self._limits = limits
        self._buffer = buffer
        self._block_tables = block_tables
        self._cache = cache
        self._layers = cache.layers
        self._packer = StepPacker(
            buffer, limits, page_size=shape.page_size, cache_bytes=shape.dtype.itemsize
        )
        scale = 1.0 / math.sqrt(shape.head_dim)
        heads: dict[str, Any] = {
            "num_heads": limits.num_heads,
            "num_kv_heads": limits.num_kv_heads,
            "head_dim": shape.head_dim,
            "page_size": shape.page_size,
            "dtype": dtype,
            "cache_dtype": shape.dtype,
        }
        self._rope_and_write = RopeAndWrite(loader, cos_sin=cos_sin, **heads)
        self._rotary_rows = RotaryRows(buffer, cos_sin, axes, limits.max_model_len)
        self._rope_and_write.prepare(self._rotary_rows.on_device, buffer["kv_locations"])
        self._windows = {
            size: _Window(
                index=index,
                size=size,
                decode=DecodeAttention(loader, scale=scale, **heads),
                prefills={
                    tile: PrefillAttention(loader, softmax_scale=scale, tile=tile, **heads)
                    for tile in TILES
                },
                combine=CombinePartials(
                    loader, num_heads=limits.num_heads, head_dim=shape.head_dim, dtype=dtype
                ),
            )
            for index, size in enumerate(limits.distinct_windows)
        }
        self._prefixes = {
            tile: PrefixAttention(loader, softmax_scale=scale, tile=tile, **heads)
            for tile in (TILES if limits.may_share else ())
        }
        partials = (limits.max_partials, limits.num_heads)
        floats: dict[str, Any] = {"dtype": torch.float32, "device": loader.device}
        self._partials: dict[str, Any] = {
            "partial_out": torch.empty((*partials, shape.head_dim), **floats),
            "partial_lse": torch.empty(partials, **floats),
        }
        self.shape = padded_shape(limits, 1, shares=False)
        """Shape of the step whose launches are set."""

    @property
    def may_share(self) -> bool:
        """True if steps may have shared prefixes."""
        return self._limits.may_share

    def copy_pages(self, copies: Copies) -> None:
        """See :meth:`gpu.attention.Attention.copy_pages`."""
        self._cache.copy_pages(copies)

    def page(self, number: int) -> list[torch.Tensor]:
        """See :meth:`gpu.attention.Attention.page`; block until all queued copies are done."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        return self._cache.page(number)

    def begin(self, layout: StepLayout) -> None:
        """Pack a step into the step buffer and set its launches."""
        shared = self._packer.find_shared(layout, layout.num_decode_rows)
        self.prepare(self._packer.pack(layout, shared=shared))
        self._rotary_rows.pack(layout)

    def begin_padded(self, num_rows: int, *, shares: bool) -> None:
        """Set the launches for any step of up to ``num_rows`` rows of one token, to be captured.

        ``shares`` says whether such steps may have shared prefixes.
        """
        self.prepare(padded_shape(self._limits, num_rows, shares=shares))

    def find_shared(self, layout: StepLayout, num_rows: int) -> SharedPrefixes | None:
        """Return the shared prefixes worth using in a step that is padded to ``num_rows`` rows."""
        return self._packer.find_shared(layout, num_rows)

    def pack_padded(self, layout: StepLayout, num_rows: int, shared: SharedPrefixes | None) -> None:
        """Pack a step for what was captured for ``num_rows``; the launches stay as they are."""
        self._packer.pack(layout, padded_to=num_rows, shared=shared)
        self._rotary_rows.pack(layout, padded_to=num_rows)

    def rope_and_write(
        self, layer: int, qkv: torch.Tensor, rotate: bool, qk_norm: QkNorm | None = None
    ) -> torch.Tensor:
        """See :meth:`gpu.attention.Attention.rope_and_write`."""
        cache = self._layers[layer]
        self._rope_and_write.launch(
            qkv,
            cache.keys,
            cache.values,
            rotate=rotate,
            qk_norm=qk_norm,
            k_scale=cache.key_scales,
            v_scale=cache.value_scales,
        )
        return qkv[:, : self._limits.num_heads]

    def attend(self, layer: int, q: torch.Tensor, window: int | None) -> torch.Tensor:
        """See :meth:`gpu.attention.Attention.attend`."""
        step, work, cache = self.shape, self._windows[window], self._layers[layer]
        keys, values = cache.keys, cache.values
        scales = {"k_scale": cache.key_scales, "v_scale": cache.value_scales}
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if step.prefix_tile is not None and window is None:
            self._prefixes[step.prefix_tile].launch(q, keys, values, **scales)
        if step.num_decode_rows:
            work.decode.launch(q, keys, values, out, **scales)
        if step.prefill_tile is not None:
            prefill = work.prefills[step.prefill_tile]
            prefill.launch(q, keys, values, out, window=window, **scales)
        if step.has_partials[window]:
            work.combine.launch(out)
        return out

    def prepare(self, step: StepShape) -> None:
        """Set the grids and buffers of all launches of a step."""
        self.shape = step
        for window in self._windows.values():
            if step.num_decode_rows:
                self._prepare_decode(window, step.num_items[window.size])
            if step.prefill_tile is not None:
                self._prepare_prefill(window, step.prefill_tile, step.num_prefill_items)
            if step.has_partials[window.size]:
                window.combine.prepare(
                    partial_start=self._partial_start(window),
                    num_rows=step.num_tokens,
                    **self._partials,
                )
        if step.prefix_tile is not None:
            self._prepare_prefix(step.prefix_tile, step.num_prefix_items)

    def _prepare_decode(self, window: _Window, num_items: int) -> None:
        buffer = self._buffer
        window.decode.prepare(
            slots=buffer["slots"],
            block_tables=self._block_tables,
            items=buffer[f"items.{window.index}"][: 4 * num_items].view(-1, 4),
            num_items=buffer[f"num_items.{window.index}"],
            **self._partials,
        )

    def _prepare_prefill(self, window: _Window, tile: int, num_items: int) -> None:
        buffer = self._buffer
        window.prefills[tile].prepare(
            items=buffer["prefill_items"][: ITEM_FIELDS * num_items].view(-1, ITEM_FIELDS),
            num_items=num_items,
            query_start=buffer["query_start"],
            context_lens=buffer["context_lens"],
            slots=buffer["slots"],
            block_tables=self._block_tables,
            partial_start=self._partial_start(window),
            **self._partials,
        )

    def _prepare_prefix(self, tile: int, num_items: int) -> None:
        buffer = self._buffer
        self._prefixes[tile].prepare(
            items=buffer["prefix_items"][: ITEM_FIELDS * num_items].view(-1, ITEM_FIELDS),
            num_items=buffer["num_prefix_items"],
            members=buffer["prefix_members"],
            slots=buffer["slots"],
            block_tables=self._block_tables,
            partial_start=self._partial_start(self._windows[None]),
            **self._partials,
        )

    def _partial_start(self, window: _Window) -> torch.Tensor:
        return self._buffer[f"partial_start.{window.index}"]
