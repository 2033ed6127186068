"""FlashInfer's attention (Ye et al. 2025, arXiv:2501.01005) over the very same pages.

Its layout "HND" is ours, so nothing is copied. It has one scale for a whole e4m3 cache, so there it
computes something else than we do, of the same size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench.kernels.attention_data import AttentionData, AttentionSpec, Buffers, reference
from bench.kernels.case import Contestant, Peer, PeerAbsent, poison, relative_error
from bench.kernels.peers import flashinfer_module
from bench.kernels.timing import Launch

_WORKSPACE_BYTES = 256 << 20
_LAYOUT = "HND"
# About what brings e4m3 numbers of up to 448 back to those of a normal distribution.
_SCALE = 1 / 128


def attention_peers(data: AttentionData) -> list[Peer]:
    """Return the back ends that offer what ``data`` asks for."""
    decodes = all(count == 1 for count, _ in data.spec.rows)
    peers = [Peer(name="flashinfer fa3", make=lambda: _prefill(data, "fa3"))]
    if not decodes:
        return [Peer(name="flashinfer fa2", make=lambda: _prefill(data, "fa2")), *peers]
    return [
        Peer(name="flashinfer fa2", make=lambda: _decode(data)),
        *peers,
        Peer(name="flashinfer xqa", make=lambda: _xqa(data)),
    ]


def cascade_peers(data: AttentionData) -> list[Peer]:
    """Return attention over a shared prefix and each row's own pages, merged."""
    return [Peer(name="flashinfer cascade", make=lambda: _cascade(data))]


def _workspace() -> torch.Tensor:
    # Some back ends keep semaphores in it and want zeros at first.
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def _page_lists(data: AttentionData, first: int = 0) -> tuple[torch.Tensor, ...]:
    """Return indptr, indices and tokens on the last page of each row's pages from ``first`` on."""
    spec = data.spec
    counts = [pages - first for pages in spec.pages_of_rows]
    indptr = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    rows = range(len(spec.rows))
    indices = torch.cat([data.pages(row)[first:] for row in rows]).to(torch.int32)
    last = [(context - 1) % spec.page_size + 1 for context in spec.contexts]
    return indptr, indices, torch.tensor(last, dtype=torch.int32)


def _sizes(spec: AttentionSpec) -> tuple[int, ...]:
    return spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.page_size


def _types(spec: AttentionSpec) -> dict[str, torch.dtype]:
    return {"q_data_type": spec.dtype, "kv_data_type": spec.cache_dtype}


def _window_left(data: AttentionData) -> int:
    return data.spec.window - 1 if data.spec.window else -1


def _contestant(data: AttentionData, run: Callable[[torch.Tensor, Buffers], object]) -> Contestant:
    """Return a contestant that runs with contiguous queries, the best case of this library."""
    queries = [buffers.queries(data.spec.num_heads).contiguous() for buffers in data.sets]
    launches: list[Launch] = [
        partial(run, q, buffers) for q, buffers in zip(queries, data.sets, strict=True)
    ]

    def error() -> float:
        poison(data.sets[0].out)
        launches[0]()
        return relative_error(data.sets[0].out, reference(data, one_scale=_SCALE))

    # An e4m3 product rounds the weights, too.
    return Contestant(launches=launches, error=error, tolerance=0.08 if data.spec.fp8 else 0.01)


def _scales(data: AttentionData) -> dict[str, float]:
    return {"k_scale": _SCALE, "v_scale": _SCALE} if data.spec.fp8 else {}


def _decode(data: AttentionData) -> Contestant:
    spec = data.spec
    wrapper = flashinfer_module().BatchDecodeWithPagedKVCacheWrapper(
        _workspace(), _LAYOUT, use_tensor_cores=True, backend="fa2"
    )
    wrapper.plan(*_page_lists(data), *_sizes(spec), window_left=_window_left(data), **_types(spec))
    return _contestant(data, _paged_run(wrapper, data))


def _prefill(data: AttentionData, backend: str) -> Contestant:
    spec = data.spec
    if spec.fp8 and backend == "fa3":
        raise PeerAbsent("flashinfer fa3 wants e4m3 queries for an e4m3 cache")
    wrapper = flashinfer_module().BatchPrefillWithPagedKVCacheWrapper(
        _workspace(), _LAYOUT, backend=backend
    )
    counts = [0, *(count for count, _ in spec.rows)]
    wrapper.plan(
        torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32),
        *(*_page_lists(data), *_sizes(spec)),
        causal=True,
        window_left=_window_left(data),
        **_types(spec),
    )
    return _contestant(data, _paged_run(wrapper, data))


def _paged_run(wrapper: Any, data: AttentionData) -> Callable[[torch.Tensor, Buffers], object]:
    def run(q: torch.Tensor, buffers: Buffers) -> None:
        pages = (buffers.k_cache, buffers.v_cache)
        wrapper.run(q, pages, out=buffers.out, **_scales(data))

    return run


def _xqa(data: AttentionData) -> Contestant:
    spec = data.spec
    decode = flashinfer_module().decode.xqa_batch_decode_with_kv_cache
    workspace = _workspace()
    tables = data.block_tables.clamp(min=0).contiguous()
    lengths = torch.tensor(spec.contexts, dtype=torch.uint32, device=tables.device)
    scale = _SCALE if spec.fp8 else 1.0

    def run(q: torch.Tensor, buffers: Buffers) -> None:
        pages = (buffers.k_cache, buffers.v_cache)
        scales = {"bmm1_scale": scale * spec.head_dim**-0.5, "bmm2_scale": scale}
        how = {"window_left": _window_left(data), "out": buffers.out, "kv_layout": _LAYOUT}
        decode(q, pages, workspace, tables, lengths, max(spec.contexts), **scales, **how)

    return _contestant(data, run)


def _cascade(data: AttentionData) -> Contestant:
    spec, rows = data.spec, len(data.spec.rows)
    shared = spec.num_shared_pages
    wrapper = flashinfer_module().MultiLevelCascadeAttentionWrapper(2, _workspace(), _LAYOUT)
    indptr, indices, last = _page_lists(data, first=shared)
    device = data.block_tables.device

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    wrapper.plan(
        [ints([0, rows]), ints(list(range(rows + 1)))],
        [ints([0, shared]), indptr.to(device)],
        [data.block_tables[0, :shared].contiguous(), indices],
        [ints([spec.page_size]), last.to(device)],
        *_sizes(spec),
        **_types(spec),
    )

    def run(q: torch.Tensor, buffers: Buffers) -> None:
        # It has no argument for the output; copying it costs 2 x 256 kB here.
        buffers.out.copy_(wrapper.run(q, (buffers.k_cache, buffers.v_cache)))

    return _contestant(data, run)
