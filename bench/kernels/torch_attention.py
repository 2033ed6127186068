"""torch's own attention, on keys and values that lie in one piece: it knows no pages.

What gathering them from pages would cost isn't counted, which is in its favor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from bench.kernels.attention_data import AttentionData, reference
from bench.kernels.case import Contestant, Contestants, PeerAbsent, needs_cuda

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def torch_peers(data: AttentionData, *, flex: bool = False) -> Contestants:
    """Return Flash and cuDNN; with ``flex``, flex_attention too, which compiles for each shape."""
    peers = {
        "sdpa flash": lambda: sdpa(data, "FLASH_ATTENTION"),
        "sdpa cudnn": lambda: sdpa(data, "CUDNN_ATTENTION"),
    }
    return {**peers, "flex_attention": lambda: _flex(data)} if flex else peers


def _only_row(data: AttentionData) -> tuple[int, int]:
    """Return the queries and the context of all rows; raise if torch doesn't offer the case."""
    needs_cuda()
    spec = data.spec
    if spec.fp8:
        raise PeerAbsent("torch's attention has no e4m3 cache")
    if spec.window is not None:
        raise PeerAbsent("torch's fused attention has no sliding window")
    if len(set(spec.rows)) != 1:
        raise PeerAbsent("torch's attention wants rows of one length")
    return spec.rows[0]


def sdpa(data: AttentionData, backend: str) -> Contestant:
    """Return scaled_dot_product_attention with the ``SDPBackend`` of that name."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    count, context = _only_row(data)
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

    count, context = _only_row(data)
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
    """Return a contestant; ``attend`` gets [rows, heads, tokens, head_dim], each contiguous."""
    count, context = data.spec.rows[0]

    def gathered(cache: torch.Tensor) -> torch.Tensor:
        pages = cache[data.block_tables.long()].transpose(2, 3).flatten(1, 2)[:, :context]
        return pages.transpose(1, 2).contiguous()

    sets = [
        (
            buffers.q.unflatten(0, (-1, count)).transpose(1, 2).contiguous(),
            gathered(buffers.cache.keys),
            gathered(buffers.cache.values),
        )
        for buffers in data.sets
    ]
    return Contestant.over(
        sets,
        attend,
        lambda: reference(data),
        found=lambda attended: attended.transpose(1, 2).flatten(0, 1),
        tolerance=0.01,
    )
