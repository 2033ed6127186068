"""Paged attention in plain torch: the reference, and the CPU's implementation without kernels.

The cache of a layer is one tensor of blocks, [2 * num_kv_heads * num_pages, page_size * head_dim]:
the keys of head 0 page by page, then of head 1 and so on, then the values likewise. Gathering the
blocks of many rows in the order of heads gives [heads, rows, keys, head_dim] for batched products,
without another copy.

Rows of one token are computed together in buckets of similar length, with two batched products and
a softmax. The queries that share a key head are folded into the query length, so keys aren't
repeated for grouped-query attention. Rows of several tokens are computed one by one with torch's
fused attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from gpu.attention import CacheShape, QkNorm, StepLayout
from gpu.attention.scores import ScoreRule, attend_by_rule, plain_rule
from gpu.executor import Copies

# A further bucket costs about as much as computing BUCKET_COST numbers of keys and values. A bucket
# larger than the limit falls out of the cache between its gather and its products.
BUCKET_COST = 1 << 19
BUCKET_LIMIT = 1 << 22


@attrs.frozen
class _Bucket:
    """Rows of one token each, padded to the same number of pages."""

    rows: slice
    blocks: torch.Tensor  # [2 * num_kv_heads * rows * pages] int64, blocks to gather
    keys: slice  # the visible keys of a single row; several rows have the mask
    mask: torch.Tensor | None  # [num_kv_heads * rows, 1, keys], 0 or -inf; None for one row


@attrs.frozen
class _Chunk:
    """One row of several tokens."""

    tokens: slice
    blocks: torch.Tensor  # [2 * num_kv_heads * pages] int64
    keys: slice
    mask: torch.Tensor | None  # [tokens, keys], 0 or -inf; None for a causal mask


class TorchCpuAttention:
    """:class:`gpu.attention.Attention` for the CPU, in float32 or bfloat16.

    ``cos_sin`` is the table of :func:`gpu.models.rope.cos_sin_table`, None if ``rope_and_write``
    isn't used. ``windows`` are all values that ``attend`` will be called with. ``axes`` [head_dim]
    say which rotary position each column of ``cos_sin`` takes; None if a layout has none.
    """

    def __init__(
        self,
        shape: CacheShape,
        num_heads: int,
        cos_sin: torch.Tensor | None,
        windows: Sequence[int | None] = (None,),
        axes: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self._shape = shape
        self._num_heads = num_heads
        self._group = num_heads // shape.num_kv_heads
        self._rule = plain_rule(shape.head_dim)
        self._windows = tuple(dict.fromkeys(windows))
        self._angles = None if cos_sin is None else _signed(cos_sin.to(shape.dtype))
        self._axes = None if axes is None else torch.from_numpy(axes)
        blocks, size = 2 * shape.num_kv_heads * shape.num_pages, shape.page_size * shape.head_dim
        self._cache = [_zeros(blocks, size, shape.dtype) for _ in range(shape.num_layers)]
        self._first_block = torch.arange(2 * shape.num_kv_heads) * shape.num_pages
        self._workspace = torch.empty(0, size, dtype=shape.dtype)
        self._work: dict[int | None, tuple[list[_Bucket], list[_Chunk]]] = {}

    def copy_pages(self, copies: Copies) -> None:
        """See :meth:`gpu.attention.Attention.copy_pages`."""
        for source, destination in copies.tolist():
            for layer in self._cache:
                pages = layer.view(2 * self._shape.num_kv_heads, self._shape.num_pages, -1)
                pages[:, destination] = pages[:, source]

    def page(self, number: int) -> list[torch.Tensor]:
        """See :meth:`gpu.attention.Attention.page`."""
        heads = 2 * self._shape.num_kv_heads
        shape = (heads, self._shape.num_pages, -1)
        return [layer.view(shape)[:, number].view(torch.uint8) for layer in self._cache]

    def begin(self, layout: StepLayout) -> None:
        """See :meth:`gpu.attention.Attention.begin`."""
        shape = self._shape
        positions = torch.from_numpy(layout.positions)
        row_of_token = torch.repeat_interleave(torch.from_numpy(layout.query_start).diff())
        tables = torch.from_numpy(layout.block_tables).to(torch.int64)
        pages = tables[row_of_token, positions // shape.page_size]
        # Rows of the cache viewed as [2 * num_kv_heads * num_pages * page_size, head_dim].
        blocks = pages[:, None] + self._first_block
        offsets = (positions % shape.page_size)[:, None]
        self._write_index = (blocks * shape.page_size + offsets).view(-1)
        if self._angles is not None:
            self._step_cos, self._step_sin = (
                self._of_step(table, layout)[:, None] for table in self._angles
            )
        self._work = {
            window: (self._buckets(layout, tables, window), self._chunks(layout, tables, window))
            for window in self._windows
        }
        gathers = [item.blocks for both in self._work.values() for items in both for item in items]
        needed = max((len(blocks) for blocks in gathers), default=0)
        if needed > len(self._workspace):
            self._workspace = self._workspace.new_empty(needed, self._workspace.shape[1])

    def _of_step(self, table: torch.Tensor, layout: StepLayout) -> torch.Tensor:
        """Return the numbers [T, head_dim] of a step's tokens in a table of all positions."""
        if layout.rotary_positions is None:
            return table.index_select(0, torch.from_numpy(layout.positions))
        assert self._axes is not None
        return table.gather(0, torch.from_numpy(layout.rotary_positions)[:, self._axes])

    def rope_and_write(
        self, layer: int, qkv: torch.Tensor, rotate: bool, qk_norm: QkNorm | None = None
    ) -> torch.Tensor:
        """See :meth:`gpu.attention.Attention.rope_and_write`."""
        head_dim = self._shape.head_dim
        x = qkv[:, : self._num_heads + self._shape.num_kv_heads]
        if qk_norm is not None:
            x.copy_(F.rms_norm(x, (head_dim,), None, qk_norm.eps) * qk_norm.weight)
        if rotate:
            x.copy_(torch.addcmul(x * self._step_cos, x.roll(head_dim // 2, -1), self._step_sin))
        self.write(layer, qkv[:, self._num_heads :])
        return qkv[:, : self._num_heads]

    def write(self, layer: int, keys_values: torch.Tensor) -> None:
        """Write [T, 2 * num_kv_heads, head_dim], key heads and then value heads, to the cache."""
        head_dim = self._shape.head_dim
        written = keys_values.reshape(-1, head_dim)
        self._cache[layer].view(-1, head_dim).index_copy_(0, self._write_index, written)

    def attend(
        self, layer: int, q: torch.Tensor, window: int | None, rule: ScoreRule | None = None
    ) -> torch.Tensor:
        """See :meth:`gpu.attention.Attention.attend`; ``rule`` replaces the usual softmax."""
        out = torch.empty(q.shape, dtype=q.dtype)
        buckets, chunks = self._work[window]
        rule = rule or self._rule
        for bucket in buckets:
            self._attend_bucket(layer, q, bucket, out, rule)
        for chunk in chunks:
            self._attend_chunk(layer, q, chunk, out, rule)
        return out

    def _gather(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        """Return keys and values, [2, num_kv_heads, rows * keys, head_dim], in a reused buffer."""
        gathered = self._workspace[: len(blocks)]
        torch.index_select(self._cache[layer], 0, blocks, out=gathered)
        return gathered.view(2, self._shape.num_kv_heads, -1, self._shape.head_dim)

    def _attend_bucket(
        self, layer: int, q: torch.Tensor, bucket: _Bucket, out: torch.Tensor, rule: ScoreRule
    ) -> None:
        num_kv_heads, head_dim = self._shape.num_kv_heads, self._shape.head_dim
        gathered = self._gather(layer, bucket.blocks)
        rows = bucket.rows.stop - bucket.rows.start
        grouped = (rows, num_kv_heads, self._group, head_dim)
        queries = q[bucket.rows].view(grouped)
        result = out[bucket.rows].view(grouped)
        if bucket.mask is None and rule.is_plain:
            keys, values = gathered[:, None, :, bucket.keys]
            result.copy_(F.scaled_dot_product_attention(queries, keys, values, scale=rule.scale))
            return
        seen = gathered if bucket.mask is not None else gathered[:, :, bucket.keys]
        keys, values = seen.reshape(2, num_kv_heads * rows, -1, head_dim)
        folded = queries.transpose(0, 1).reshape(-1, self._group, head_dim)
        if bucket.mask is not None and rule.is_plain:
            scores = torch.baddbmm(bucket.mask, folded, keys.transpose(1, 2), alpha=rule.scale)
            attended = torch.bmm(scores.softmax(dim=-1), values)
        else:
            sinks = None
            if rule.sinks is not None:
                sinks = rule.sinks.view(num_kv_heads, self._group, 1).repeat_interleave(rows, 0)
            attended = attend_by_rule(folded, keys, values, rule, bucket.mask, sinks)
        by_head = attended.view(num_kv_heads, rows, self._group, head_dim)
        result.copy_(by_head.transpose(0, 1))

    def _attend_chunk(
        self, layer: int, q: torch.Tensor, chunk: _Chunk, out: torch.Tensor, rule: ScoreRule
    ) -> None:
        num_kv_heads = self._shape.num_kv_heads
        gathered = self._gather(layer, chunk.blocks)[:, :, chunk.keys]
        # [num_kv_heads, group, tokens or keys, head_dim]; the keys' stride along group is 0.
        keys, values = gathered[:, :, None].expand(-1, -1, self._group, -1, -1)
        grouped = (-1, num_kv_heads, self._group, self._shape.head_dim)
        queries = q[chunk.tokens].view(grouped).permute(1, 2, 0, 3)
        if rule.is_plain:
            causal = chunk.mask is None
            attended = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=chunk.mask, is_causal=causal, scale=rule.scale
            )
        else:
            mask, sinks = chunk.mask, rule.sinks
            if mask is None:
                mask = _additive(torch.ones(keys.shape[-2:-1] * 2).tril().bool(), q.dtype)
            if sinks is not None:
                sinks = sinks.view(num_kv_heads, self._group, 1, 1)
            attended = attend_by_rule(queries, keys, values, rule, mask, sinks)
        out[chunk.tokens].view(grouped).copy_(attended.permute(2, 0, 1, 3))

    def _buckets(
        self, layout: StepLayout, tables: torch.Tensor, window: int | None
    ) -> list[_Bucket]:
        size = self._shape.page_size
        contexts = layout.context_lens[: layout.num_decode_rows]
        oldest = np.maximum(contexts - window, 0) if window else np.zeros_like(contexts)
        first, last = oldest // size, (contexts - 1) // size
        lengths = (last - first + 1) * size
        per_key = 2 * self._shape.num_kv_heads * self._shape.head_dim
        buckets = []
        for begin, end in split_buckets(lengths, BUCKET_COST // per_key, BUCKET_LIMIT // per_key):
            rows = slice(begin, end)
            pages = torch.arange(int(lengths[rows].max()) // size)
            index = torch.from_numpy(first[rows])[:, None] + pages
            # Shorter rows repeat their last page, which the mask hides.
            index = index.clamp(max=torch.from_numpy(last[rows])[:, None])
            blocks = self._blocks(tables[rows].gather(1, index))
            offset = int(first[begin]) * size
            keys = slice(int(oldest[begin]) - offset, int(contexts[begin]) - offset)
            mask = None
            if end - begin > 1:
                mask = self._bucket_mask(contexts[rows], oldest[rows], first[rows], len(pages))
            buckets.append(_Bucket(rows, blocks, keys, mask))
        return buckets

    def _bucket_mask(
        self,
        contexts: npt.NDArray[np.int64],
        oldest: npt.NDArray[np.int64],
        first: npt.NDArray[np.int64],
        num_pages: int,
    ) -> torch.Tensor:
        """Return [num_kv_heads * rows, 1, keys]: 0 for visible keys, -inf for the others."""
        size = self._shape.page_size
        positions = (first * size)[:, None] + np.arange(num_pages * size)
        seen = (positions < contexts[:, None]) & (positions >= oldest[:, None])
        mask = _additive(torch.from_numpy(seen), self._shape.dtype)
        return mask.repeat(self._shape.num_kv_heads, 1)[:, None]

    def _chunks(self, layout: StepLayout, tables: torch.Tensor, window: int | None) -> list[_Chunk]:
        size = self._shape.page_size
        chunks = []
        for row in range(layout.num_decode_rows, len(layout.context_lens)):
            tokens = slice(int(layout.query_start[row]), int(layout.query_start[row + 1]))
            context = int(layout.context_lens[row])
            start = context - (tokens.stop - tokens.start)  # position of the first query
            oldest = max(start - window + 1, 0) if window else 0
            first = oldest // size
            blocks = self._blocks(tables[row, first : (context - 1) // size + 1])
            keys = slice(oldest - first * size, context - first * size)
            mask = None
            if start > 0 or (window and context > window):
                queries = torch.arange(start, context)[:, None]
                positions = torch.arange(oldest, context)
                seen = positions <= queries
                if window:
                    seen &= positions > queries - window
                mask = _additive(seen, self._shape.dtype)
            chunks.append(_Chunk(tokens, blocks, keys, mask))
        return chunks

    def _blocks(self, pages: torch.Tensor) -> torch.Tensor:
        """Return the blocks of ``pages`` for each key head, then each value head, as flat int64."""
        return (self._first_block[:, None] + pages.reshape(-1)).view(-1)


def _zeros(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros that take no memory until they are written; ``torch.zeros`` writes them at once.

    Uninitialized memory won't do: a masked key has the weight 0, but 0 times NaN is NaN.
    """
    data = np.zeros(rows * columns * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(data).view(dtype).view(rows, columns)


def _signed(cos_sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and signed sines for whole heads: x * cos + roll(x) * sin rotates a head x."""
    cos, sin = cos_sin.chunk(2, dim=1)
    return torch.cat([cos, cos], dim=-1).contiguous(), torch.cat([-sin, sin], dim=-1).contiguous()


def _additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -math.inf)


def split_buckets(lengths: npt.NDArray[np.int64], cost: int, limit: int) -> list[tuple[int, int]]:
    """Cut rows into runs, each padded to its longest row; return (begin, end) pairs in order.

    ``lengths`` are the keys of each row. A cut is made if it saves more than ``cost`` keys of
    padding. A run of several rows has at most ``limit`` keys.
    """
    buckets: list[tuple[int, int]] = []
    pending = [(0, len(lengths))] if len(lengths) else []
    while pending:
        begin, end = pending.pop()
        run = lengths[begin:end]
        before = np.maximum.accumulate(run)[:-1]  # longest row before each possible cut
        after = np.maximum.accumulate(run[::-1])[::-1][1:]
        left = np.arange(1, len(run))
        padded = before * left + after * (len(run) - left)
        whole = int(run.max()) * len(run)
        if len(run) > 1 and (whole - int(padded.min()) > cost or whole > limit):
            # Over the limit, and no cut saves enough: cut in half.
            cut = int(padded.argmin()) + 1 if whole - int(padded.min()) > cost else len(run) // 2
            pending += [(begin + cut, end), (begin, begin + cut)]
        else:
            buckets.append((begin, end))
    return buckets
