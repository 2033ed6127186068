"""Random inputs of an attention case, and what attention gives for them in float64."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from bench.kernels.case import Setting, poison
from bench.kernels.roofline import AttentionShape

_E4M3_LARGEST = 448.0
# Scores of a block of the reference: so many numbers of 8 bytes at once.
_BLOCK_SCORES = 1 << 27


@attrs.frozen(kw_only=True)
class AttentionSpec:
    """One shape of an attention case.

    Row i has ``rows[i][0]`` queries, the last tokens of a context of ``rows[i][1]``. The first
    ``shared`` tokens (whole pages) are the same pages in all rows. ``cache_dtype`` is ``dtype`` or
    e4m3, which has a scale for each token and head.
    """

    rows: tuple[tuple[int, int], ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    shared: int = 0

    @property
    def fp8(self) -> bool:
        """True for an e4m3 cache."""
        return self.cache_dtype == torch.float8_e4m3fn

    @property
    def num_tokens(self) -> int:
        """The queries of all rows together."""
        return sum(count for count, _ in self.rows)

    @property
    def contexts(self) -> list[int]:
        """Each row's context."""
        return [context for _, context in self.rows]

    @property
    def num_shared_pages(self) -> int:
        """Pages that all rows have in common."""
        return self.shared // self.page_size

    @property
    def pages_of_rows(self) -> list[int]:
        """The pages that each row's table names, shared ones included."""
        return [-(-context // self.page_size) for context in self.contexts]

    @property
    def num_pages(self) -> int:
        """Different pages in use."""
        own = sum(pages - self.num_shared_pages for pages in self.pages_of_rows)
        return own + self.num_shared_pages

    @property
    def work_shape(self) -> AttentionShape:
        """The shape as :mod:`bench.kernels.roofline` counts it."""
        names = ("num_heads", "num_kv_heads", "head_dim")
        heads = {name: getattr(self, name) for name in names}
        return AttentionShape(kv_bytes=2 - self.fp8, scale_bytes=4 * self.fp8, **heads)


@attrs.frozen(kw_only=True)
class Buffers:
    """The tensors of one launch.

    Caches are [num_pages, K, page_size, D], their scales [num_pages, K, page_size] float32.
    """

    qkv: torch.Tensor  # [T, H + 2 K, D]; only the queries matter
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    out: torch.Tensor  # [T, H, D]

    def queries(self, num_heads: int) -> torch.Tensor:
        """Return [T, H, D], a view as the model has it."""
        return self.qkv[:, :num_heads]


@attrs.frozen(kw_only=True)
class AttentionData:
    """Several sets of buffers under one set of block tables."""

    spec: AttentionSpec
    block_tables: torch.Tensor  # [rows, pages] int32 on the device; past a row's last page is -1
    sets: Sequence[Buffers]

    def pages(self, row: int) -> torch.Tensor:
        """Return the pages of a row, int64."""
        return self.block_tables[row, : self.spec.pages_of_rows[row]].long()


def make_data(spec: AttentionSpec, setting: Setting) -> AttentionData:
    """Return random queries, keys and values, in pages that lie in random order."""
    order = setting.permutation(spec.num_pages)
    width = max(spec.pages_of_rows)
    tables = torch.full((len(spec.rows), width), -1, dtype=torch.int32, device=setting.device)
    shared = spec.num_shared_pages
    tables[:, :shared] = order[:shared]
    given = shared
    for row, pages in enumerate(spec.pages_of_rows):
        tables[row, shared:pages] = order[given : given + pages - shared]
        given += pages - shared
    tokens = spec.num_pages * spec.page_size
    count = setting.sets(tokens * spec.work_shape.kv_bytes_per_token)
    sets = [_make_buffers(spec, setting) for _ in range(count)]
    return AttentionData(spec=spec, block_tables=tables, sets=sets)


def _make_buffers(spec: AttentionSpec, setting: Setting) -> Buffers:
    heads = spec.num_heads + 2 * spec.num_kv_heads
    qkv = setting.random((spec.num_tokens, heads, spec.head_dim), spec.dtype)
    shape = (spec.num_tokens, spec.num_heads, spec.head_dim)
    out = torch.empty(shape, dtype=spec.dtype, device=setting.device)
    poison(out)
    shape = (spec.num_pages, spec.num_kv_heads, spec.page_size, spec.head_dim)
    caches = [setting.random(shape, spec.dtype) for _ in range(2)]
    scales: list[torch.Tensor | None] = [None, None]
    if spec.fp8:
        found = [_quantize(cache) for cache in caches]
        caches, scales = [cache for cache, _ in found], [scale for _, scale in found]
    pages = {"k_cache": caches[0], "v_cache": caches[1]}
    return Buffers(qkv=qkv, out=out, k_scale=scales[0], v_scale=scales[1], **pages)


def _quantize(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 numbers, and the float32 scale of each vector of ``head_dim``."""
    scale = values.float().abs().amax(-1) / _E4M3_LARGEST
    return (values.float() / scale[..., None]).to(torch.float8_e4m3fn), scale


def reference(data: AttentionData, *, one_scale: float | None = None) -> torch.Tensor:
    """Return attention of the first set of buffers in float64, [T, H, D].

    ``one_scale`` counts instead of all scales of an e4m3 cache, for peers that have only one.
    """
    spec, buffers = data.spec, data.sets[0]
    group = spec.num_heads // spec.num_kv_heads
    out = torch.empty(buffers.out.shape, dtype=torch.float64, device=buffers.out.device)
    start = 0
    for row, (count, context) in enumerate(spec.rows):
        keys, values = _gathered(data, row, context, one_scale)
        q = buffers.queries(spec.num_heads)[start : start + count].double()
        grouped = q.view(count, spec.num_kv_heads, group, spec.head_dim)
        block = max(1, _BLOCK_SCORES // (context * spec.num_heads))
        for first in range(0, count, block):
            chunk = grouped[first : first + block]
            scores = torch.einsum("tkgd,nkd->tkgn", chunk, keys) * spec.head_dim**-0.5
            seen = _seen(context - count + first, len(chunk), context, spec.window, q.device)
            scores.masked_fill_(~seen[:, None, None], float("-inf"))
            attended = torch.einsum("tkgn,nkd->tkgd", scores.softmax(-1), values)
            out[start + first : start + first + len(chunk)] = attended.flatten(1, 2)
        start += count
    return out


def _seen(
    position: int, count: int, context: int, window: int | None, device: torch.device
) -> torch.Tensor:
    """Return [count, context]: the keys that the queries from ``position`` on see."""
    queries = torch.arange(position, position + count, device=device)[:, None]
    keys = torch.arange(context, device=device)
    seen = keys <= queries
    return seen & (keys > queries - window) if window else seen


def _gathered(
    data: AttentionData, row: int, context: int, one_scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a row's keys and values, each [context, K, D] float64."""
    buffers, pages = data.sets[0], data.pages(row)
    found = []
    for cache, scale in ((buffers.k_cache, buffers.k_scale), (buffers.v_cache, buffers.v_scale)):
        values = cache[pages].double()
        if scale is not None:
            values *= scale[pages].double()[..., None] if one_scale is None else one_scale
        found.append(values.transpose(1, 2).flatten(0, 1)[:context])
    return found[0], found[1]
