"""Work items for ``decode_attention.cu``, cut from the rows of a decode step.

Pure arithmetic over context lengths. An item is a run of positions of one row; a block of the
kernel computes it for one KV head. A row of one item writes its output directly. The items of a
longer row ("split-K", flash-decoding) write partial results, which ``combine_partials.cu`` merges.

Two ways of cutting:

*Balanced* (the default): as many items as fill the GPU once, if the rows are few; never an item
that is much longer than an equal share of all positions. How a row is cut then depends on the
batch, and so does the rounding of its result.

*Fixed*: cuts at multiples of ``fixed_split`` counted from position 0. A row's result is the same,
bit for bit, in whatever batch it is computed.
"""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt

TILE = 16
"""Items begin and end at multiples of this, but for the ends of what a row sees."""

MIN_SPLIT = 64
"""The fewest positions of an item of a split row: one tile for each warp of a block."""

_Ints = npt.NDArray[np.int32]


@attrs.frozen(kw_only=True)
class Splits:
    """The work of one decode step over R rows."""

    items: _Ints
    """[N, 4]: row, begin, end, index of the partial result or -1; the longest first."""
    partial_start: _Ints
    """[R + 1]: row r owns the partial results ``partial_start[r]`` to ``partial_start[r + 1] - 1``,
    first those reserved for its prefix, then one for each of its items in their order."""

    @property
    def num_partials(self) -> int:
        """Number of items of all rows, the reserved ones included."""
        return int(self.partial_start[-1])


def max_items(
    num_rows: int, target_items: int, *, fixed_split: int | None = None, max_context: int = 0
) -> int:
    """Return the most items that :func:`split` makes of up to ``num_rows`` rows.

    It is also the most partial results, besides those that are reserved. ``max_context``, the
    longest context that a row may have, counts for ``fixed_split`` only.
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
        context_lens: [R], the positions of each row including its new token; 0 for a padded row.
        target_items: how many items fill the GPU once: multiprocessors times blocks on each,
            divided by the KV heads.
        window: a row sees its last so many positions; all of them if this is None.
        begin: [R], positions below are not wanted (another kernel attends to a shared prefix).
        reserved: [R], how many partial results of each row come before those of its items. A row
            that has any never writes its output directly.
        fixed_split: cut at multiples of this, and don't look at the rest of the batch. It must be a
            multiple of 16.
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
    """Return how many items there may be beyond one for each row.

    The rows fill the rest of one wave of blocks; if they fill half of it by themselves, as many
    more as half a wave keep the longest rows from being the last to finish.
    """
    return max(target_items - num_rows, target_items // 2, 1)


def _balance(
    begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], target_items: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Positions of an item, and number of items, for each row.

    A row gets one item and its share of the extra ones, rounded down: so their sum is bounded, and
    no item is longer than all positions divided by the extra items.
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
    """Item i of a row covers ``chunks`` positions from ``origins + i * chunks``, within its own."""
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
