"""Our attention kernels, prepared once over the inputs of a case as a step prepares its layers.

A prepared kernel knows addresses only, so every launch carries the tensors behind them along.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from bench.kernels.attention_data import AttentionData, AttentionSpec, Buffers
from bench.kernels.case import Setting
from bench.kernels.timing import Launch
from gpu.attention.prefill_items import choose_tile, prefill_items
from gpu.attention.shared_prefix import (
    PrefixCost,
    SharedPrefixes,
    prefix_tile,
    shared_prefixes,
)
from gpu.attention.splits import split
from gpu.kernels.combine_partials import CombinePartials
from gpu.kernels.decode_attention import DecodeAttention
from gpu.kernels.tiled_attention import PrefillAttention, PrefixAttention

_BLOCKS_PER_MULTIPROCESSOR = 2  # of the kernels of attention_tile.cuh
_MAX_PARTIALS = 1 << 16


@attrs.frozen(kw_only=True)
class _Partials:
    """Room for partial results, and the kernel that merges them into P rows of the output."""

    out: torch.Tensor  # [max(partials, 1), H, D] float32
    lse: torch.Tensor  # [max(partials, 1), H] float32
    start: torch.Tensor  # [P + 1] int32
    combine: CombinePartials | None  # None where nothing was split

    def launch(self, out: torch.Tensor) -> None:
        """Merge, if there is anything to merge."""
        if self.combine is not None:
            self.combine.launch(out)


def _partials(start: npt.NDArray[np.int32], spec: AttentionSpec, setting: Setting) -> _Partials:
    count = int(start[-1])
    shape = (max(count, 1), spec.num_heads, spec.head_dim)
    out = torch.full(shape, float("nan"), device=setting.device)
    lse = torch.full(shape[:2], float("nan"), device=setting.device)
    on_device = _ints(start, setting)
    combine = None
    if count:
        combine = CombinePartials(
            setting.loader, num_heads=spec.num_heads, head_dim=spec.head_dim, dtype=spec.dtype
        )
        combine.prepare(
            partial_out=out, partial_lse=lse, partial_start=on_device, num_rows=len(start) - 1
        )
    return _Partials(out=out, lse=lse, start=on_device, combine=combine)


def _ints(values: npt.ArrayLike, setting: Setting) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int32)).to(setting.device)


def _heads(spec: AttentionSpec) -> dict[str, Any]:
    """What every attention kernel is made for."""
    return {
        "dtype": spec.dtype,
        "cache_dtype": spec.cache_dtype,
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "page_size": spec.page_size,
    }


def _decode_kernel(spec: AttentionSpec, setting: Setting) -> DecodeAttention:
    return DecodeAttention(
        setting.loader,
        **_heads(spec),
        scale=spec.head_dim**-0.5,
    )


def decode_launches(data: AttentionData, setting: Setting) -> Sequence[Launch]:
    """Rows of one query each, split as the product splits them."""
    spec = data.spec
    kernel = _decode_kernel(spec, setting)
    splits = split(spec.contexts, target_items=kernel.target_items, window=spec.window)
    partials = _partials(splits.partial_start, spec, setting)
    tensors: dict[str, Any] = {
        "slots": _ints(range(len(spec.rows)), setting),
        "block_tables": data.block_tables,
        **_items(splits.items, setting),
        "partial_out": partials.out,
        "partial_lse": partials.lse,
    }
    kernel.prepare(**tensors)

    def launch(buffers: Buffers, _alive: object) -> None:
        _launch_decode(kernel, buffers, spec)
        partials.launch(buffers.out)

    return [partial(launch, buffers, tensors) for buffers in data.sets]


def _items(items: npt.NDArray[np.int32], setting: Setting) -> dict[str, Any]:
    return {"items": _ints(items, setting), "num_items": _ints([len(items)], setting)}


def _launch_decode(kernel: DecodeAttention, buffers: Buffers, spec: AttentionSpec) -> None:
    kernel.launch(
        buffers.queries(spec.num_heads),
        buffers.k_cache,
        buffers.v_cache,
        buffers.out,
        buffers.k_scale,
        buffers.v_scale,
    )


def _prefix_kernel(spec: AttentionSpec, setting: Setting) -> PrefixAttention:
    return PrefixAttention(
        setting.loader,
        **_heads(spec),
        softmax_scale=spec.head_dim**-0.5,
        tile=prefix_tile(len(spec.rows), spec.num_heads // spec.num_kv_heads),
    )


def _find_shared(data: AttentionData, rows_per_tile: int, setting: Setting) -> SharedPrefixes:
    spec = data.spec
    blocks = _BLOCKS_PER_MULTIPROCESSOR * setting.loader.num_multiprocessors
    shared = shared_prefixes(
        data.block_tables.cpu().numpy(),
        np.array(spec.contexts),
        page_size=spec.page_size,
        cost=PrefixCost(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            cache_bytes=spec.cache_dtype.itemsize,
            rows_per_tile=rows_per_tile,
            launch=0.0,  # so that the tiny shapes of the emulation share, too
        ),
        target_items=max(1, blocks // spec.num_kv_heads),
    )
    if not len(shared.items):
        raise ValueError("the rows share pages, but no group of them was made")
    return shared


def shared_launches(data: AttentionData, setting: Setting) -> Sequence[Launch]:
    """Rows of one query each over a common prefix: the prefix once, the rests, and their merge.

    Raises:
        ValueError: the pages are shared, but the kernel for that wouldn't be used.
    """
    spec = data.spec
    decode, prefix = _decode_kernel(spec, setting), _prefix_kernel(spec, setting)
    shared = _find_shared(data, prefix.tokens_per_tile, setting)
    splits = split(
        spec.contexts,
        target_items=decode.target_items,
        begin=shared.prefix_lens,
        reserved=shared.num_partials,
    )
    partials = _partials(splits.partial_start, spec, setting)
    common: dict[str, Any] = {
        "slots": _ints(range(len(spec.rows)), setting),
        "block_tables": data.block_tables,
        "partial_out": partials.out,
        "partial_lse": partials.lse,
    }
    of_prefix = {
        **_items(shared.items, setting),
        "members": _ints(shared.members, setting),
        "partial_start": partials.start,
    }
    of_rests = _items(splits.items, setting)
    prefix.prepare(**common, **of_prefix)
    decode.prepare(**common, **of_rests)

    def launch(buffers: Buffers, _alive: object) -> None:
        prefix.launch(
            buffers.queries(spec.num_heads),
            buffers.k_cache,
            buffers.v_cache,
            k_scale=buffers.k_scale,
            v_scale=buffers.v_scale,
        )
        _launch_decode(decode, buffers, spec)
        partials.launch(buffers.out)

    return [partial(launch, buffers, (common, of_prefix, of_rests)) for buffers in data.sets]


def prefill_launches(data: AttentionData, setting: Setting) -> Sequence[Launch]:
    """Rows of several queries each, tiled and split as the product does it."""
    spec = data.spec
    query_lens = np.array([count for count, _ in spec.rows])
    contexts = np.array(spec.contexts)
    kernel = PrefillAttention(
        setting.loader,
        **_heads(spec),
        softmax_scale=spec.head_dim**-0.5,
        tile=choose_tile(query_lens, spec.num_heads // spec.num_kv_heads),
    )
    plan = prefill_items(
        query_lens,
        contexts,
        tokens_per_tile=kernel.tokens_per_tile,
        num_kv_heads=spec.num_kv_heads,
        num_blocks=_BLOCKS_PER_MULTIPROCESSOR * setting.loader.num_multiprocessors,
        window=spec.window,
        max_partials=_MAX_PARTIALS,
    )
    start = np.concatenate([[0], plan.num_partials.cumsum()]).astype(np.int32)
    partials = _partials(start, spec, setting)
    tensors = {
        "items": _ints(plan.items, setting),
        "query_start": _ints([0, *query_lens.cumsum()], setting),
        "context_lens": _ints(contexts, setting),
        "slots": _ints(range(len(spec.rows)), setting),
        "block_tables": data.block_tables,
        "partial_start": partials.start,
        "partial_out": partials.out,
        "partial_lse": partials.lse,
    }
    kernel.prepare(num_items=len(plan.items), **tensors)

    def launch(buffers: Buffers, _alive: object) -> None:
        kernel.launch(
            buffers.queries(spec.num_heads),
            buffers.k_cache,
            buffers.v_cache,
            buffers.out,
            window=spec.window,
            k_scale=buffers.k_scale,
            v_scale=buffers.v_scale,
        )
        partials.launch(buffers.out)

    return [partial(launch, buffers, tensors) for buffers in data.sets]
