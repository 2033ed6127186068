"""Cuts the rows of a decode step into work items for ``decode_attention.cu``.

An item is a range of positions of one row; a block of the kernel computes it for one KV head. A row
of one item writes its output directly. The items of a longer row (split-K, flash-decoding) write
partial results, which ``combine_partials.cu`` merges.

*Balanced* cuts (the default): a small batch gets as many items as fill the GPU once, and no item is
much longer than an equal share of all positions. The cuts of a row depend on its batch, and so does
the rounding of its result.

*Fixed* cuts are at multiples of ``fixed_split`` from position 0. A row's result is bit-identical in
every batch.
"""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt

TILE = 16
"""Items begin and end at multiples of this, except at the first and last visible position."""

MIN_SPLIT = 64
"""Fewest positions of an item of a split row: one tile for each warp of a block."""

_Ints = npt.NDArray[np.int32]


@attrs.frozen(kw_only=True)
class Splits:
    """The work of one decode step over R rows."""

    items: _Ints
    """[N, 4]: row, begin, end, index of the partial result or -1; longest first."""
    partial_start: _Ints
    """[R + 1]: row r has the partial results ``partial_start[r]`` to ``partial_start[r + 1] - 1``,
    first those reserved for its prefix, then one for each item."""

    @property
    def num_partials(self) -> int:
        """Number of partial results of all rows, including the reserved ones."""
        return int(self.partial_start[-1])


def max_items(
    num_rows: int, target_items: int, *, fixed_split: int | None = None, max_context: int = 0
) -> int:
    """Return the largest number of items that :func:`split` makes of up to ``num_rows`` rows.

    This also bounds the partial results that aren't reserved. ``max_context``, the longest context
    of a row, matters for ``fixed_split`` only.
    """
    if fixed_split is not None:
        return num_rows * -(-max_context // fixed_split)
    return num_rows + _extra_items(num_rows, target_items)


def split(
    context_lens: npt.ArrayLike,
    *,
    target_items: int,
    window: int | None = None,
    begin: npt.ArrayLike | None = None,
    reserved: npt.ArrayLike | None = None,
    fixed_split: int | None = None,
) -> Splits:
    """Cut R rows into items.

    Args:
        context_lens: [R], positions of each row, including its new token; 0 for a padding row.
        target_items: number of items that fill the GPU once: multiprocessors times blocks on each,
            divided by the KV heads.
        window: number of last positions that a row sees; None for all.
        begin: [R], first position; another kernel attends to the shared prefix before it.
        reserved: [R], number of each row's partial results before those of its items. A row that
            has any never writes its output directly.
        fixed_split: cut at multiples of this, independently of the batch; a multiple of 16.
    """
    ends = np.asarray(context_lens, dtype=np.int64)
    begins = np.zeros_like(ends) if begin is None else np.minimum(begin, ends)
    if window is not None:
        begins = np.maximum(begins, ends - window)
    if fixed_split is not None:
        assert fixed_split % TILE == 0
        chunks: npt.NDArray[np.int64] | int = fixed_split
        counts = -(-ends // fixed_split) - begins // fixed_split
        counts[begins == ends] = 0
        origins = begins // fixed_split * fixed_split
    else:
        chunks, counts = _balance(begins, ends, target_items)
        origins = begins // TILE * TILE
    return _cut(begins, ends, origins, chunks, counts, reserved)


def _extra_items(num_rows: int, target_items: int) -> int:
    """Return the number of items beyond one for each row.

    They fill up one wave of blocks. If the rows fill more than half of it, there is another half
    wave of items, so that the longest rows aren't the last to finish.
    """
    return max(target_items - num_rows, target_items // 2, 1)


def _balance(
    begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], target_items: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the positions of an item and the number of items, for each row.

    A row gets one item and its share of the extra ones, rounded down. This bounds the number of
    items, and no item is longer than all positions divided by the extra items.
    """
    origins = begins // TILE * TILE
    lengths = np.where(ends > begins, ends - origins, 0)
    total = int(lengths.sum())
    extra = _extra_items(int(np.count_nonzero(lengths)), target_items)
    wanted = 1 + lengths * extra // max(total, 1)
    wanted = np.minimum(wanted, np.maximum(lengths // MIN_SPLIT, 1))
    chunks = -(-lengths // (wanted * TILE)) * TILE
    counts = -(-lengths // np.maximum(chunks, 1))
    return chunks, counts


def _cut(
    begins: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    origins: npt.NDArray[np.int64],
    chunks: npt.NDArray[np.int64] | int,
    counts: npt.NDArray[np.int64],
    reserved: npt.ArrayLike | None,
) -> Splits:
    """Make the items: item i of a row has ``chunks`` positions from ``origins + i * chunks`` on."""
    num_rows = len(ends)
    first_item = np.cumsum(counts) - counts
    rows = np.repeat(np.arange(num_rows), counts)
    index = np.arange(len(rows)) - first_item[rows]  # within the row
    own_chunks = chunks if isinstance(chunks, int) else chunks[rows]
    start = origins[rows] + index * own_chunks

    before = np.zeros_like(counts) if reserved is None else np.asarray(reserved, dtype=np.int64)
    partials = np.where((counts > 1) | (before > 0), counts, 0) + before
    partial_start = np.zeros(num_rows + 1, dtype=np.int32)
    np.cumsum(partials, out=partial_start[1:])

    items = np.empty((len(rows), 4), dtype=np.int32)
    items[:, 0] = rows
    items[:, 1] = np.maximum(start, begins[rows])
    items[:, 2] = np.minimum(start + own_chunks, ends[rows])
    items[:, 3] = np.where(partials[rows] > 0, (partial_start[:-1] + before)[rows] + index, -1)
    longest_first = np.argsort(items[:, 1] - items[:, 2], kind="stable")
    return Splits(items=items[longest_first], partial_start=partial_start)
