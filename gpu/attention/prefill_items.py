"""Work items of ``prefill_attention``: the tokens and keys of each block, longest first."""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt

ITEM_FIELDS = 5
"""Number of fields of an item, here and in :mod:`gpu.attention.shared_prefix`."""

KEY_STEP = 64
"""Splits begin at multiples of this many positions, the kernel's largest tile of keys."""
MIN_SPLIT = 512
"""Fewest keys of a split; with fewer, writing and merging partial results costs more."""


@attrs.frozen(kw_only=True)
class PrefillItems:
    """The items of one step, and the number of their partial results."""

    items: npt.NDArray[np.int32]  # [N, 5] = {row, first_token, begin, end, split}
    num_partials: npt.NDArray[np.int32]  # [tokens of the rows], 0 where keys aren't split


def choose_tile(query_lens: npt.NDArray[np.int64], group: int) -> int:
    """Return the tile of a step: 64 packed queries if 128 would leave a third of the tiles empty.

    A full tile of 128 is 1.5 times as fast as two of 64, because its warps use what they read from
    shared memory twice as often. 64 pays only if rounding up to whole tiles costs more than that.
    """
    padded = [int(np.sum(-(-query_lens // (tile // group)))) * tile for tile in (128, 64)]
    return 64 if padded[0] > 1.5 * padded[1] else 128


def prefill_items(
    query_lens: npt.NDArray[np.int64],
    context_lens: npt.NDArray[np.int64],
    *,
    tokens_per_tile: int,
    num_kv_heads: int,
    num_blocks: int,
    window: int | None = None,
    first_row: int = 0,
    max_partials: int = 0,
) -> PrefillItems:
    """Cut rows into tiles of tokens, and their keys into splits if blocks would be idle otherwise.

    Keys are split only if there are fewer tiles than blocks that run in parallel, as with a short
    chunk over a long context in the next turn of a chat. A split then has about an equal share of
    the work.

    Args:
        query_lens: [R] new tokens of each row, at least 1.
        context_lens: [R] positions of each row, including the new ones.
        tokens_per_tile: tokens in a tile of the kernel.
        num_kv_heads: number of blocks for each item.
        num_blocks: number of blocks that run in parallel (two on each multiprocessor).
        window: the widest window of any layer, None if a layer has none. Layers with a narrower
            window skip keys themselves.
        first_row: number of the first row in the items.
        max_partials: number of partial results that fit; 0 forbids splits.
    """
    tiles = -(-query_lens // tokens_per_tile)
    row = np.repeat(np.arange(len(tiles)), tiles)
    first = (np.arange(len(row)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tokens_per_tile
    tokens = np.minimum(tokens_per_tile, query_lens[row] - first)
    position = context_lens[row] - query_lens[row] + first
    end = position + tokens
    begin = np.zeros_like(end) if window is None else np.maximum(0, position - window + 1)
    begin -= begin % KEY_STEP
    splits, length = _splits(end - begin, num_kv_heads, num_blocks)
    if int((splits * tokens)[splits > 1].sum()) > max_partials:
        splits, length = np.ones_like(end), end - begin
    num_partials = np.where(splits > 1, splits, 0)
    tile = np.repeat(np.arange(len(row)), splits)
    split = np.arange(len(tile)) - np.repeat(np.cumsum(splits) - splits, splits)
    split_begin = begin[tile] + split * length[tile]
    split_end = np.minimum(split_begin + length[tile], end[tile])
    items = np.stack(
        [
            first_row + row[tile],
            first[tile],
            split_begin,
            split_end,
            np.where(splits[tile] > 1, split, -1),
        ],
        axis=1,
    )
    longest_first = np.argsort(split_begin - split_end, kind="stable")
    return PrefillItems(
        items=items[longest_first].astype(np.int32),
        num_partials=np.repeat(num_partials, tokens).astype(np.int32),
    )


def _splits(
    num_keys: npt.NDArray[np.int64], num_kv_heads: int, num_blocks: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the number of splits of each tile, and the keys of a split (fewer in the last)."""
    if len(num_keys) * num_kv_heads >= num_blocks:
        return np.ones_like(num_keys), num_keys
    share = max(MIN_SPLIT, int(num_keys.sum()) * num_kv_heads // num_blocks)
    wanted = -(-num_keys // share)
    length = -(-num_keys // (wanted * KEY_STEP)) * KEY_STEP
    return -(-num_keys // length), length
