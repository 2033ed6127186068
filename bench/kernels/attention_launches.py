"""Our attention kernels, prepared once over the inputs of a case as a step prepares its layers.

A prepared kernel knows addresses only, so every launch carries the tensors behind them along.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from gpu.attention.shared_prefix import PrefixCost, SharedPrefixes, prefix_tile, shared_prefixes
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

    @classmethod
    def of(cls, start: npt.NDArray[np.int32], spec: AttentionSpec, setting: Setting) -> _Partials:
        """Return room for the partial results that ``start`` counts."""
        count, heads = int(start[-1]), {"num_heads": spec.num_heads, "head_dim": spec.head_dim}
        shape = (max(count, 1), spec.num_heads, spec.head_dim)
        out = torch.full(shape, float("nan"), device=setting.device)
        lse = torch.full(shape[:2], float("nan"), device=setting.device)
        on_device, combine = _ints(start, setting), None
        if count:
            combine = CombinePartials(setting.loader, dtype=spec.dtype, **heads)
            places = {"partial_out": out, "partial_lse": lse, "partial_start": on_device}
            combine.prepare(num_rows=len(start) - 1, **places)
        return cls(out=out, lse=lse, start=on_device, combine=combine)

    @property
    def places(self) -> dict[str, torch.Tensor]:
        """The tensors that kernels write partial results to."""
        return {"partial_out": self.out, "partial_lse": self.lse}

    def launch(self, out: torch.Tensor) -> None:
        """Merge, if there is anything to merge."""
        if self.combine is not None:
            self.combine.launch(out)


def _ints(values: npt.ArrayLike, setting: Setting) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int32)).to(setting.device)


def _heads(spec: AttentionSpec) -> dict[str, Any]:
    """Return the shape and the types that every attention kernel is made for."""
    names = ("dtype", "cache_dtype", "num_heads", "num_kv_heads", "head_dim", "page_size")
    return {name: getattr(spec, name) for name in names}


def _rows(data: AttentionData, setting: Setting) -> dict[str, Any]:
    slots = _ints(range(len(data.spec.rows)), setting)
    return {"slots": slots, "block_tables": data.block_tables}


def _items(items: npt.NDArray[np.int32], setting: Setting) -> dict[str, Any]:
    return {"items": _ints(items, setting), "num_items": _ints([len(items)], setting)}


def _launches(
    data: AttentionData, run: Callable[[Buffers], None], partials: _Partials, *alive: object
) -> Sequence[Launch]:
    """Return a launch of ``run`` and the merge for each set of buffers."""

    def launch(buffers: Buffers, _alive: object) -> None:
        run(buffers)
        partials.launch(buffers.out)

    return [partial(launch, buffers, alive) for buffers in data.sets]


def _arguments(buffers: Buffers, spec: AttentionSpec) -> tuple[torch.Tensor, ...]:
    return buffers.queries(spec.num_heads), buffers.k_cache, buffers.v_cache


def _scales(buffers: Buffers) -> dict[str, Any]:
    return {"k_scale": buffers.k_scale, "v_scale": buffers.v_scale}


def _decode_kernel(spec: AttentionSpec, setting: Setting) -> DecodeAttention:
    return DecodeAttention(setting.loader, **_heads(spec), scale=spec.head_dim**-0.5)


def _run_decode(kernel: DecodeAttention, spec: AttentionSpec, buffers: Buffers) -> None:
    scales = (buffers.k_scale, buffers.v_scale)
    kernel.launch(*_arguments(buffers, spec), buffers.out, *scales)


def decode_launches(data: AttentionData, setting: Setting) -> Sequence[Launch]:
    """Return launches over rows of one query each, split as the product splits them."""
    spec = data.spec
    kernel = _decode_kernel(spec, setting)
    splits = split(spec.contexts, target_items=kernel.target_items, window=spec.window)
    partials = _Partials.of(splits.partial_start, spec, setting)
    tensors = {**_rows(data, setting), **_items(splits.items, setting), **partials.places}
    kernel.prepare(**tensors)
    return _launches(data, partial(_run_decode, kernel, spec), partials, tensors)


def _find_shared(data: AttentionData, rows_per_tile: int, setting: Setting) -> SharedPrefixes:
    spec = data.spec
    blocks = _BLOCKS_PER_MULTIPROCESSOR * setting.loader.num_multiprocessors
    sizes = {name: getattr(spec, name) for name in ("num_heads", "num_kv_heads", "head_dim")}
    # Without a launch's cost, so that the tiny shapes of the emulation share, too.
    cache_bytes = spec.cache_dtype.itemsize
    cost = PrefixCost(cache_bytes=cache_bytes, rows_per_tile=rows_per_tile, launch=0.0, **sizes)
    tables, contexts = data.block_tables.cpu().numpy(), np.array(spec.contexts)
    target = max(1, blocks // spec.num_kv_heads)
    how = {"page_size": spec.page_size, "cost": cost, "target_items": target}
    shared = shared_prefixes(tables, contexts, **how)
    if not len(shared.items):
        raise ValueError("the rows share pages, but no group of them was made")
    return shared


def shared_launches(data: AttentionData, setting: Setting) -> Sequence[Launch]:
    """Return launches over rows of one query each: the common prefix once, the rests, the merge."""
    spec = data.spec
    tile = prefix_tile(len(spec.rows), spec.num_heads // spec.num_kv_heads)
    softmax = {"softmax_scale": spec.head_dim**-0.5, "tile": tile}
    prefix = PrefixAttention(setting.loader, **_heads(spec), **softmax)
    decode = _decode_kernel(spec, setting)
    shared = _find_shared(data, prefix.tokens_per_tile, setting)
    rests = {"begin": shared.prefix_lens, "reserved": shared.num_partials}
    splits = split(spec.contexts, target_items=decode.target_items, **rests)
    partials = _Partials.of(splits.partial_start, spec, setting)
    common = {**_rows(data, setting), **partials.places}
    members = {"members": _ints(shared.members, setting), "partial_start": partials.start}
    of_prefix = {**_items(shared.items, setting), **members}
    of_rests = _items(splits.items, setting)
    prefix.prepare(**common, **of_prefix)
    decode.prepare(**common, **of_rests)

    def run(buffers: Buffers) -> None:
        prefix.launch(*_arguments(buffers, spec), **_scales(buffers))
        _run_decode(decode, spec, buffers)

    return _launches(data, run, partials, common, of_prefix, of_rests)


def prefill_launches(data: AttentionData, setting: Setting) -> Sequence[Launch]:
    """Return launches over rows of several queries each, tiled and split as the product does it."""
    spec = data.spec
    query_lens, contexts = np.array([count for count, _ in spec.rows]), np.array(spec.contexts)
    tile = choose_tile(query_lens, spec.num_heads // spec.num_kv_heads)
    softmax = {"softmax_scale": spec.head_dim**-0.5, "tile": tile}
    kernel = PrefillAttention(setting.loader, **_heads(spec), **softmax)
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
    partials = _Partials.of(start, spec, setting)
    tensors = {
        **_rows(data, setting),
        **partials.places,
        "items": _ints(plan.items, setting),
        "query_start": _ints([0, *query_lens.cumsum()], setting),
        "context_lens": _ints(contexts, setting),
        "partial_start": partials.start,
    }
    kernel.prepare(num_items=len(plan.items), **tensors)

    def run(buffers: Buffers) -> None:
        where = (*_arguments(buffers, spec), buffers.out)
        kernel.launch(*where, window=spec.window, **_scales(buffers))

    return _launches(data, run, partials, tensors)
