"""Random inputs of an attention case, and what attention gives for them in float64."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from bench.kernels.case import Setting
from bench.kernels.roofline import AttentionShape, Work, prefill_attention, shared_prefix_attention
from gpu.attention import CacheShape
from gpu.attention.kv_cache import FP8, KvCache, LayerCache

DTYPE = torch.bfloat16
"""Type of queries, keys and values before they are in a cache."""
_E4M3_LARGEST = 448.0
# Scores of a block of the reference: so many numbers of 8 bytes at once.
_BLOCK_SCORES = 1 << 27


@attrs.frozen(kw_only=True)
class AttentionSpec(AttentionShape):
    """One shape of an attention case.

    Row i has ``rows[i][0]`` queries, the last tokens of a context of ``rows[i][1]``. The first
    ``shared`` tokens (whole pages) are the same pages in all rows.
    """

    rows: Sequence[tuple[int, int]]
    page_size: int = 16
    window: int | None = None
    shared: int = 0

    @property
    def cache_dtype(self) -> torch.dtype:
        """Type of the cache's numbers."""
        return FP8 if self.fp8 else DTYPE

    @property
    def decodes(self) -> bool:
        """True if every row has one query."""
        return all(count == 1 for count in self.counts)

    @property
    def counts(self) -> list[int]:
        """Each row's queries."""
        return [count for count, _ in self.rows]

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
        return sum(self.pages_of_rows) - self.num_shared_pages * (len(self.rows) - 1)

    @property
    def work(self) -> Work:
        """The least work; a shared prefix is read once."""
        if self.shared:
            suffixes = [context - self.shared for context in self.contexts]
            return shared_prefix_attention(self, self.shared, suffixes)
        return prefill_attention(self, self.rows, self.window)


@attrs.frozen(kw_only=True)
class Buffers:
    """The tensors of one launch: queries and output [T, H, D], and a layer of the cache.

    The queries are a view of ``qkv`` [T, H + 2 K, D], as in a model.
    """

    qkv: torch.Tensor
    q: torch.Tensor
    cache: LayerCache
    out: torch.Tensor


@attrs.frozen(kw_only=True)
class AttentionData:
    """Several sets of buffers under one set of block tables; each set is a layer of ``cache``."""

    spec: AttentionSpec
    block_tables: torch.Tensor  # [rows, pages] int32 on the device; past a row's last page is -1
    cache: KvCache
    sets: Sequence[Buffers]

    def pages(self, row: int) -> torch.Tensor:
        """Return the pages of a row, int64."""
        return self.block_tables[row, : self.spec.pages_of_rows[row]].long()


def make_data(spec: AttentionSpec, setting: Setting) -> AttentionData:
    """Return random queries, keys and values, in pages that lie in random order."""
    tokens = spec.num_pages * spec.page_size
    shape = CacheShape(
        num_layers=setting.sets(tokens * spec.kv_bytes_per_token),
        num_pages=spec.num_pages,
        page_size=spec.page_size,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=spec.cache_dtype,
        device=setting.device,
    )
    cache = KvCache(shape)
    sets = [_buffers(spec, layer, setting) for layer in cache.layers]
    tables = _block_tables(spec, setting)
    return AttentionData(spec=spec, block_tables=tables, cache=cache, sets=sets)


def _block_tables(spec: AttentionSpec, setting: Setting) -> torch.Tensor:
    shared, *own = setting.permutation(spec.num_pages).split(
        [spec.num_shared_pages, *(pages - spec.num_shared_pages for pages in spec.pages_of_rows)]
    )
    rows = [torch.cat([shared, pages]) for pages in own]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)


def _buffers(spec: AttentionSpec, layer: LayerCache, setting: Setting) -> Buffers:
    for cache, scale in ((layer.keys, layer.key_scales), (layer.values, layer.value_scales)):
        values = setting.random(*cache.shape)
        if scale is not None:
            torch.div(values.float().abs().amax(-1), _E4M3_LARGEST, out=scale)
            values = values.float() / scale[..., None]
        cache.copy_(values)
    heads = spec.num_heads + 2 * spec.num_kv_heads
    qkv = setting.random(sum(spec.counts), heads, spec.head_dim)
    q = qkv[:, : spec.num_heads]
    out = torch.empty(q.shape, dtype=DTYPE, device=setting.device)
    return Buffers(qkv=qkv, q=q, cache=layer, out=out)


def reference(data: AttentionData, *, one_scale: float | None = None) -> torch.Tensor:
    """Return attention of the first set of buffers in float64, [T, H, D].

    ``one_scale`` counts instead of all scales of an e4m3 cache, for peers that have only one.
    """
    spec, buffers = data.spec, data.sets[0]
    group = spec.num_heads // spec.num_kv_heads
    outs = []
    for row, q in enumerate(buffers.q.split(spec.counts)):
        context = spec.contexts[row]
        in_pages = in_sequence(buffers.cache, data.pages(row), one_scale)
        keys, values = (each[:context] for each in in_pages)
        positions = torch.arange(context, device=q.device)
        block = max(1, _BLOCK_SCORES // (context * spec.num_heads))
        for queries, places in zip(q.split(block), positions[-len(q) :].split(block), strict=True):
            grouped = queries.double().unflatten(1, (spec.num_kv_heads, group))
            scores = torch.einsum("tkgd,nkd->tkgn", grouped, keys) * spec.head_dim**-0.5
            seen = positions <= places[:, None]
            if spec.window:
                seen &= positions > places[:, None] - spec.window
            scores.masked_fill_(~seen[:, None, None], float("-inf"))
            outs.append(torch.einsum("tkgn,nkd->tkgd", scores.softmax(-1), values).flatten(1, 2))
    return torch.cat(outs)


def in_sequence(
    layer: LayerCache, pages: torch.Tensor | None = None, one_scale: float | None = None
) -> list[torch.Tensor]:
    """Return the keys and values of ``pages``, or of all: each [tokens, K, D] float64, scaled."""
    chosen, found = slice(None) if pages is None else pages, []
    for cache, scale in ((layer.keys, layer.key_scales), (layer.values, layer.value_scales)):
        values = cache[chosen].double()
        if scale is not None:
            values *= scale[chosen].double()[..., None] if one_scale is None else one_scale
        found.append(values.transpose(1, 2).flatten(0, 1))
    return found
