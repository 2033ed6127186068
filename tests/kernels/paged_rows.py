"""Rows of a paged cache for attention tests, and attention in float64 to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import numpy as np
import torch

from gpu.kernels import KernelLoader
from tests.kernels.memory import place, poisoned, poisoned_cache

__all__ = [
    "PagedRows",
    "along_first_element",
    "attention_reference",
    "make_rows",
    "one_large_score",
    "rising_scores",
]


@attrs.frozen(kw_only=True)
class PagedRows:
    """One layer's cache with the keys and values of some rows, and NaN wherever no token lives."""

    k: list[torch.Tensor]  # of each row [context_len, num_kv_heads, head_dim], float64
    v: list[torch.Tensor]
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    slots: torch.Tensor
    block_tables: torch.Tensor
    page_ids: list[list[int]]


def make_rows(
    loader: KernelLoader,
    generator: torch.Generator,
    context_lens: Sequence[int],
    *,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    shared_pages: int = 0,
    first_position: int = 0,
    size: float = 1.0,
    shape_rows: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
) -> PagedRows:
    """Random keys and values, times ``size``, in random pages.

    ``shape_rows`` changes the keys and values of each row in place, both [tokens of whole pages,
    num_kv_heads, head_dim] in float32, before they are stored.

    All rows share their first ``shared_pages`` pages. Positions below ``first_position``, which a
    window has left behind, are in no page: their table entries are as wild as those past the end.
    Slots are permuted, so that a row's index and its slot's differ.
    """
    cache_dtype = cache_dtype or dtype
    first_page = first_position // page_size
    counts = [-(-n // page_size) for n in context_lens]
    num_pages = sum(counts) + 2
    free = torch.randperm(num_pages, generator=generator).tolist()
    shared = [free.pop() for _ in range(shared_pages)]
    page_ids = [shared + [free.pop() for _ in range(n - shared_pages)] for n in counts]
    k_cache, v_cache = poisoned_cache(
        num_pages=num_pages,
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        head_dim=head_dim,
        dtype=cache_dtype,
        loader=loader,
    )
    scale_shape = (num_pages, num_kv_heads, page_size)
    quantized = cache_dtype == torch.float8_e4m3fn
    k_scale = poisoned(scale_shape, torch.float32, loader) if quantized else None
    v_scale = poisoned(scale_shape, torch.float32, loader) if quantized else None
    rows: dict[str, list[torch.Tensor]] = {"k": [], "v": []}
    k_content, v_content = (
        size * torch.randn(num_pages, page_size, num_kv_heads, head_dim, generator=generator)
        for _ in range(2)
    )
    if shape_rows is not None:
        for pages in page_ids:
            k, v = k_content[pages], v_content[pages]
            shape_rows(k.flatten(0, 1), v.flatten(0, 1))
            k_content[pages], v_content[pages] = k, v
    for which, content, cache, scales in (
        ("k", k_content.to(dtype), k_cache, k_scale),
        ("v", v_content.to(dtype), v_cache, v_scale),
    ):
        if scales is not None:
            largest = content.float().abs().amax(-1)
            factors = torch.where(largest > 0, largest / 448, 1.0)
            stored = (content.float() / factors[..., None]).to(cache_dtype)
            content64 = stored.double() * factors[..., None].double()
        else:
            stored, content64 = content.to(cache_dtype), content.double()
        for n, pages in zip(context_lens, page_ids, strict=True):
            rows[which].append(content64[pages].flatten(0, 1)[:n])
            for index, page in enumerate(pages[first_page:], first_page):
                used = min(page_size, n - index * page_size)
                cache[page, :, :used] = stored[page, :used].transpose(0, 1).to(loader.device)
                if scales is not None:
                    scales[page, :, :used] = factors[page, :used].T.to(loader.device)
    slots = torch.randperm(len(context_lens) + 2, generator=generator)[: len(context_lens)].int()
    tables = np.full((len(context_lens) + 2, max(counts, default=0) + 3), 1 << 30, np.int32)
    for slot, pages in zip(slots.tolist(), page_ids, strict=True):
        tables[slot, first_page : len(pages)] = pages[first_page:]
    return PagedRows(
        k=rows["k"],
        v=rows["v"],
        k_cache=k_cache,
        v_cache=v_cache,
        k_scale=k_scale,
        v_scale=v_scale,
        slots=place(slots, loader),
        block_tables=place(torch.from_numpy(tables), loader),
        page_ids=page_ids,
    )


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float,
    position: int | None = None,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float64: ``q`` [n, H, D] over ``k`` and ``v`` [L, K, D].

    The queries stand at ``position`` and the following ones and see nothing after themselves;
    without a ``position`` they see all. Returns the output [n, H, D] and the log-sum-exp [n, H] in
    log2 units.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * softmax_scale
    if position is not None:
        own = position + torch.arange(q.shape[0])[:, None]
        key = torch.arange(k.shape[0])[None]
        hidden = key > own
        if window is not None:
            hidden |= key <= own - window
        scores = scores.masked_fill(hidden, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse[..., None])
    # A key that is not seen has weight 0, and any value.
    return torch.einsum("hqk,khd->qhd", weights, v), lse.T / np.log(2)


def along_first_element(q: torch.Tensor, size: float) -> None:
    """Make queries [tokens, heads, head_dim] 0 but for the first element, at most ``size``."""
    q.zero_()
    q[..., 0] = torch.linspace(size / 2, size, q.shape[0])[:, None]


def rising_scores(k: torch.Tensor, v: torch.Tensor) -> None:
    """Shape keys and values such that the reference of a softmax that lags is passed by far.

    Against queries of :func:`along_first_element` with a ``size`` of 8, at 64 elements a head, the
    score of token t in log2 units is 7 t / 64 at most. A reference that may lag by 2^8 is then not
    raised for the second tile of 64 keys, with weights up to 2^7. The values are nearly the
    largest of fp16.
    """
    k.zero_()
    k[..., 0] = (torch.arange(len(k)) * 7 / 64 * np.log(2))[:, None]
    v[:] = torch.where(v < 0, -1.0, 1.0) * torch.linspace(30000, 64000, v.shape[-1])


def one_large_score(k: torch.Tensor, v: torch.Tensor) -> None:
    """Shape keys and values such that float32 rounds one token's score by some hundredths.

    Against queries of :func:`along_first_element` with a ``size`` of 240, at 64 elements a head,
    that token's score in log2 units is near 2^21, of which the last bit of float32 is 2^-2; that of
    all others is 0. The values are nearly the largest of fp16.
    """
    k.zero_()
    k[len(k) // 2, :, 0] = 45000.0
    v[:] = torch.where(v < 0, -1.0, 1.0) * 64000
