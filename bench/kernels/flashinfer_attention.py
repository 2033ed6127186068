"""FlashInfer's attention (Ye et al. 2025, arXiv:2501.01005) over the very same pages.

Its layout "HND" is ours, so nothing is copied. It has one scale for a whole e4m3 cache, so there it
computes something else than we do, of the same size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from bench.kernels.attention_data import DTYPE, AttentionData, reference
from bench.kernels.case import Contestant, Contestants, PeerAbsent, flashinfer_module

_WORKSPACE_BYTES = 256 << 20
_LAYOUT = "HND"
# About what brings e4m3 numbers of up to 448 back to those of a normal distribution.
_SCALE = 1 / 128

Pages = tuple[torch.Tensor, torch.Tensor]
Run = Callable[[torch.Tensor, Pages, torch.Tensor], object]


def attention_peers(data: AttentionData) -> Contestants:
    """Return the back ends that offer what ``data`` asks for, those of a shared prefix first.

    With tensor cores the library's own wrapper for decoding runs the kernel of its fa2 prefill.
    """
    makers: dict[str, Callable[[AttentionData], Run]] = {"cascade": _cascade}
    makers = makers if data.spec.shared else {}
    makers |= {name: partial(_paged, backend=name) for name in ("fa2", "fa3")}
    makers |= {"xqa": _xqa} if data.spec.decodes else {}
    return {
        f"flashinfer {name}": lambda make=make: _contestant(data, make(data))
        for name, make in makers.items()
    }


def _contestant(data: AttentionData, run: Run) -> Contestant:
    """Return a contestant that runs with contiguous queries, the best case of this library."""
    return Contestant.over(
        [
            (each.q.contiguous(), (each.cache.keys, each.cache.values), each.out)
            for each in data.sets
        ],
        run,
        lambda: reference(data, one_scale=_SCALE),
        # An e4m3 product rounds the weights, too.
        tolerance=0.08 if data.spec.fp8 else 0.01,
    )


def _workspace() -> torch.Tensor:
    # Some back ends keep semaphores in it and want zeros at first.
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def _ints(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _starts(counts: Sequence[int]) -> torch.Tensor:
    return _ints([0, *counts]).cumsum(0, dtype=torch.int32)


def _page_lists(data: AttentionData, first: int = 0) -> tuple[torch.Tensor, ...]:
    """Return indptr, indices and tokens on the last page of each row's pages from ``first`` on."""
    spec = data.spec
    indptr = _starts([pages - first for pages in spec.pages_of_rows])
    indices = torch.cat([data.pages(row)[first:] for row in range(len(spec.rows))])
    last = [(context - 1) % spec.page_size + 1 for context in spec.contexts]
    return indptr, indices.to(torch.int32), _ints(last)


def _plan(data: AttentionData, wrapper: Any, *lists: Any, **options: Any) -> None:
    """Plan the steps of ``wrapper`` over ``lists`` of pages."""
    spec = data.spec
    sizes = (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.page_size)
    wrapper.plan(*(*lists, *sizes), q_data_type=DTYPE, kv_data_type=spec.cache_dtype, **options)


def _window_left(data: AttentionData) -> int:
    return data.spec.window - 1 if data.spec.window else -1


def _paged(data: AttentionData, backend: str) -> Run:
    if data.spec.fp8 and backend == "fa3":
        raise PeerAbsent("flashinfer fa3 wants e4m3 queries for an e4m3 cache")
    wrapper = flashinfer_module().BatchPrefillWithPagedKVCacheWrapper(
        _workspace(), _LAYOUT, backend=backend
    )
    lists = (_starts(data.spec.counts), *_page_lists(data))
    how = {"causal": not data.spec.decodes, "window_left": _window_left(data)}
    _plan(data, wrapper, *lists, **how)
    scales = {"k_scale": _SCALE, "v_scale": _SCALE} if data.spec.fp8 else {}
    return lambda q, pages, out: wrapper.run(q, pages, out=out, **scales)


def _xqa(data: AttentionData) -> Run:
    spec = data.spec
    decode = flashinfer_module().decode.xqa_batch_decode_with_kv_cache
    workspace, tables = _workspace(), data.block_tables.clamp(min=0).contiguous()
    lengths = torch.tensor(spec.contexts, dtype=torch.uint32, device=tables.device)
    scale = _SCALE if spec.fp8 else 1.0
    how = {"bmm1_scale": scale * spec.head_dim**-0.5, "bmm2_scale": scale, "kv_layout": _LAYOUT}
    how["window_left"] = _window_left(data)
    longest = max(spec.contexts)
    return lambda q, pages, out: decode(
        q, pages, workspace, tables, lengths, longest, out=out, **how
    )


def _cascade(data: AttentionData) -> Run:
    rows, shared, device = len(data.spec.rows), data.spec.num_shared_pages, data.block_tables.device
    wrapper = flashinfer_module().MultiLevelCascadeAttentionWrapper(2, _workspace(), _LAYOUT)
    indptr, indices, last = _page_lists(data, first=shared)
    _plan(
        *(data, wrapper),
        [_ints([0, rows]).to(device), _ints(range(rows + 1)).to(device)],
        [_ints([0, shared]).to(device), indptr.to(device)],
        [data.block_tables[0, :shared].contiguous(), indices],
        [_ints([data.spec.page_size]).to(device), last.to(device)],
    )
    # It has no argument for the output; copying it costs 2 x 256 kB here.
    return lambda q, pages, out: out.copy_(wrapper.run(q, pages))
