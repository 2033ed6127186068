"""torch's own attention, on keys and values that lie in one piece: it knows no pages.

What gathering them from pages would cost isn't counted, which is in its favor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from bench.kernels.attention_data import AttentionData, reference
from bench.kernels.case import Contestant, Peer, PeerAbsent, poison, relative_error
from bench.kernels.peers import needs_cuda
from bench.kernels.timing import Launch

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def torch_peers(data: AttentionData, *, flex: bool = False) -> list[Peer]:
    """Return Flash and cuDNN; with ``flex``, flex_attention too, which compiles for each shape."""
    peers = [
        Peer(name="sdpa flash", make=lambda: sdpa(data, "FLASH_ATTENTION")),
        Peer(name="sdpa cudnn", make=lambda: sdpa(data, "CUDNN_ATTENTION")),
    ]
    if flex:
        peers.append(Peer(name="flex_attention", make=lambda: _flex(data)))
    return peers


def _check(data: AttentionData) -> None:
    needs_cuda()
    spec = data.spec
    if spec.fp8:
        raise PeerAbsent("torch's attention has no e4m3 cache")
    if spec.window is not None:
        raise PeerAbsent("torch's fused attention has no sliding window")
    if len(set(spec.rows)) != 1:
        raise PeerAbsent("torch's attention wants rows of one length")


def sdpa(data: AttentionData, backend: str) -> Contestant:
    """Return scaled_dot_product_attention with the ``SDPBackend`` of that name."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    _check(data)
    count, context = data.spec.rows[0]
    chosen = getattr(SDPBackend, backend)
    if 1 < count < context and backend == "CUDNN_ATTENTION":
        raise PeerAbsent("torch's cuDNN attention masks from the upper left only")
    mask = causal_lower_right(count, context) if 1 < count < context else None

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(chosen):
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=count == context, enable_gqa=True
            )

    return _contestant(data, attend)


def _flex(data: AttentionData) -> Contestant:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    _check(data)
    count, context = data.spec.rows[0]
    start = context - count

    def causal(b: object, h: object, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return query + start >= key

    compiled = torch.compile(flex_attention, dynamic=False)
    mask = None
    if count > 1:
        mask = create_block_mask(causal, None, None, count, context, device="cuda")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        attended: torch.Tensor = compiled(q, k, v, block_mask=mask, enable_gqa=True)
        return attended

    return _contestant(data, attend)


def _contestant(data: AttentionData, attend: Attend) -> Contestant:
    """``attend`` gets [rows, heads, tokens, head_dim], each contiguous."""
    spec = data.spec
    rows, (count, context) = len(spec.rows), spec.rows[0]
    launches: list[Launch] = []
    for buffers in data.sets:
        q = buffers.queries(spec.num_heads).view(rows, count, spec.num_heads, spec.head_dim)
        gathered = []
        for cache in (buffers.k_cache, buffers.v_cache):
            pages = cache[data.block_tables.long()].transpose(2, 3).flatten(1, 2)[:, :context]
            gathered.append(pages.transpose(1, 2).contiguous())
        launches.append(partial(attend, q.transpose(1, 2).contiguous(), *gathered))

    def error() -> float:
        poison(data.sets[0].out)
        attended = launches[0]()
        assert isinstance(attended, torch.Tensor)
        return relative_error(attended.transpose(1, 2).flatten(0, 1), reference(data))

    return Contestant(launches=launches, error=error, tolerance=0.01)
