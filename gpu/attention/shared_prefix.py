"""Finds prefixes shared by decode rows, so that attention reads each prefix once.

Rows share a prefix if their block tables begin with the same pages. The prefixes form a tree: all
rows may share a system prompt, some of them a document after it, and two of them a whole prompt.
``prefix_attention`` computes one group for each row, so each row takes part at one node of the
tree, in the group of all rows below it. The nodes are chosen to save most time.

Only whole pages before a row's newest token count, so that ``decode_attention`` always has a part
of each row left. Layers with a sliding window don't use shared prefixes. Everything is computed on
arrays, without a loop over rows or groups.
"""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt

from gpu.attention.prefill_items import ITEM_FIELDS, KEY_STEP

MIN_SPLIT = 256
"""Fewest keys of a split; with fewer, writing and merging partial results costs more."""

_Ints = npt.NDArray[np.int64]


@attrs.frozen(kw_only=True)
class PrefixCost:
    """A model of the time that a group saves in one layer.

    Without a group each row reads the prefix. With one, the prefix is read once, or the arithmetic
    of whole tiles takes longer than that; and each row has at least one more partial result to
    write and read.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    cache_bytes: int
    """Bytes of one element of the cache."""
    rows_per_tile: int
    bandwidth: float = 4.0e12
    """Bandwidth of device memory in bytes/s; only the ratio to ``arithmetic`` matters much."""
    arithmetic: float = 3.0e14
    """Floating-point operations/s of the kernel on full tiles."""
    launch: float = 4.0e-6
    """Seconds that a further launch takes; the groups of a step must save more in total."""

    def saved(self, num_rows: _Ints, prefix_len: _Ints) -> npt.NDArray[np.float64]:
        """Return seconds saved by groups of ``num_rows`` rows with ``prefix_len`` positions."""
        position_bytes = 2 * self.num_kv_heads * self.head_dim * self.cache_bytes
        read_once = prefix_len * position_bytes / self.bandwidth
        tiles = -(-num_rows // self.rows_per_tile)
        operations = 4 * self.num_heads * self.head_dim * self.rows_per_tile * tiles * prefix_len
        together = np.maximum(read_once, operations / self.arithmetic)
        partial_bytes = 2 * 4 * self.num_heads * (self.head_dim + 1)
        return num_rows * read_once - together - num_rows * partial_bytes / self.bandwidth


@attrs.frozen(kw_only=True)
class PrefixGroups:
    """G groups of decode rows, each with a shared prefix. No row is in two groups."""

    members: _Ints
    """Row indices, group after group."""
    sizes: _Ints
    """[G], number of rows of each group."""
    prefix_lens: _Ints
    """[G], length of each group's prefix: whole pages, in positions."""


NO_GROUPS = PrefixGroups(
    members=np.zeros(0, np.int64), sizes=np.zeros(0, np.int64), prefix_lens=np.zeros(0, np.int64)
)


@attrs.frozen(kw_only=True)
class SharedPrefixes:
    """The work of ``prefix_attention`` for R decode rows; empty if sharing doesn't pay."""

    items: npt.NDArray[np.int32]
    """[N, 5] = {first, count, begin, end, split}, longest first: the partial result ``split`` of
    rows ``members[first:first + count]`` over positions begin..end-1."""
    members: npt.NDArray[np.int32]
    """Row indices, group after group."""
    prefix_lens: npt.NDArray[np.int32]
    """[R], the start of each row's own part: ``begin`` of :func:`gpu.attention.splits.split`."""
    num_partials: npt.NDArray[np.int32]
    """[R], each row's number of partial results for the prefix: ``reserved`` of that function."""


def prefix_tile(num_rows: int, group: int) -> int:
    """Return the tile for steps of up to ``num_rows`` rows: 128 packed queries if four get full.

    Smaller steps are bound by the bandwidth of reading the prefix, where 64 is as fast.
    """
    return 128 if num_rows * group >= 4 * 128 else 64


def max_prefix_items(num_rows: int, target_items: int) -> int:
    """Return the largest number of items that :func:`shared_prefixes` makes of ``num_rows`` rows.

    They have at most ``rows_per_tile`` times as many partial results.
    """
    return num_rows // 2 + target_items


def shared_prefixes(
    block_tables: npt.NDArray[np.int32],
    context_lens: _Ints,
    *,
    page_size: int,
    cost: PrefixCost,
    target_items: int,
) -> SharedPrefixes:
    """Find the groups of rows that share a prefix, and cut their work into items.

    Args:
        block_tables: [R, P], page ids; entries after a row's last page are ignored.
        context_lens: [R], positions of each row, including its new token; 0 for a padding row.
        page_size: number of positions in a page.
        cost: the cost model that decides whether a group pays.
        target_items: number of items that fill the GPU once: blocks in parallel / KV heads.
    """
    groups = prefix_groups(block_tables, context_lens, page_size=page_size, cost=cost)
    return prefix_items(
        groups,
        num_rows=len(context_lens),
        rows_per_tile=cost.rows_per_tile,
        target_items=target_items,
    )


def prefix_groups(
    block_tables: npt.NDArray[np.int32],
    context_lens: _Ints,
    *,
    page_size: int,
    cost: PrefixCost,
) -> PrefixGroups:
    """Return the groups that save most in total, none if that is too little.

    Only whole pages count, so the groups stay the same while the rows of a batch do. See
    :func:`shared_prefixes` for the arguments.
    """
    whole_pages = np.minimum(np.maximum(context_lens - 1, 0) // page_size, block_tables.shape[1])
    groups = _best_groups(_prefix_tree(block_tables, whole_pages), page_size, cost)
    total = float(cost.saved(groups.sizes, groups.prefix_lens).sum())
    return groups if total > cost.launch else NO_GROUPS


def prefix_items(
    groups: PrefixGroups, *, num_rows: int, rows_per_tile: int, target_items: int
) -> SharedPrefixes:
    """Cut the work of groups into items, with as many splits as give about one wave of blocks."""
    sizes, prefix_lens = groups.sizes, groups.prefix_lens
    tiles = -(-sizes // rows_per_tile)
    share = max(MIN_SPLIT, -(-int((tiles * prefix_lens).sum()) // target_items))
    # Splits of one prefix have equal length, in whole tiles of keys.
    split_len = -(-prefix_lens // (-(-prefix_lens // share) * KEY_STEP)) * KEY_STEP
    splits = -(-prefix_lens // split_len)

    row_prefix, row_partials = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
    row_prefix[groups.members] = np.repeat(prefix_lens, sizes)
    row_partials[groups.members] = np.repeat(splits, sizes)

    # An item for each pair of a tile of the group's rows and a split of its prefix.
    counts = tiles * splits
    group = np.repeat(np.arange(len(sizes)), counts)
    index = np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts)
    tile, split = index // splits[group], index % splits[group]
    first, begin = tile * rows_per_tile, split * split_len[group]
    items = np.empty((len(group), ITEM_FIELDS), np.int32)
    items[:, 0] = (np.cumsum(sizes) - sizes)[group] + first
    items[:, 1] = np.minimum(rows_per_tile, sizes[group] - first)
    items[:, 2] = begin
    items[:, 3] = np.minimum(begin + split_len[group], prefix_lens[group])
    items[:, 4] = split
    longest_first = np.argsort(items[:, 2] - items[:, 3], kind="stable")
    return SharedPrefixes(
        items=items[longest_first],
        members=groups.members.astype(np.int32),
        prefix_lens=row_prefix,
        num_partials=row_partials,
    )


@attrs.frozen(kw_only=True)
class _Level:
    """The nodes of one level of the tree."""

    rows: _Ints  # rows of all nodes, node after node
    starts: _Ints  # [nodes], index in `rows` of each node's first row
    sizes: _Ints  # [nodes], number of rows
    pages: _Ints  # [nodes], number of leading pages that its rows share
    parents: _Ints  # [nodes], index in the level above


def _prefix_tree(tables: npt.NDArray[np.int32], whole_pages: _Ints) -> list[_Level]:
    """Return the levels of the tree: sets of two or more rows that share more than their parent."""
    levels: list[_Level] = []
    rows = np.flatnonzero(whole_pages)
    nodes = np.zeros(len(rows), np.int64)  # the parent of each of `rows`
    depths = np.zeros(len(rows), np.int64)  # number of pages that all rows of the parent share
    while len(rows):
        # Rows of one node with the same next page make a node of this level.
        pages = tables[rows, depths].astype(np.int64)
        order = np.lexsort((pages, nodes))
        rows, nodes, pages = rows[order], nodes[order], pages[order]
        is_first = np.ones(len(rows), bool)
        is_first[1:] = (nodes[1:] != nodes[:-1]) | (pages[1:] != pages[:-1])
        starts = np.flatnonzero(is_first)
        sizes = np.diff(starts, append=len(rows))
        shared = np.repeat(sizes > 1, sizes)
        if not shared.any():
            break
        parents = nodes[starts][sizes > 1]
        rows, sizes = rows[shared], sizes[sizes > 1]
        starts = np.cumsum(sizes) - sizes
        node_of_row = np.repeat(np.arange(len(sizes)), sizes)
        common = _common_pages(tables, whole_pages, rows, rows[starts][node_of_row])
        node_pages = np.minimum.reduceat(common, starts)
        levels.append(
            _Level(rows=rows, starts=starts, sizes=sizes, pages=node_pages, parents=parents)
        )
        deeper = whole_pages[rows] > node_pages[node_of_row]
        rows, nodes = rows[deeper], node_of_row[deeper]
        depths = node_pages[nodes]
    return levels


def _common_pages(
    tables: npt.NDArray[np.int32], whole_pages: _Ints, rows: _Ints, others: _Ints
) -> _Ints:
    """Return the number of leading pages that ``rows[i]`` and ``others[i]`` have in common."""
    common = np.minimum(whole_pages[rows], whole_pages[others])
    left = np.flatnonzero(rows != others)
    first, width = 0, 32
    while len(left):  # doubling widths, so that little is compared after the first difference
        columns = slice(first, first + width)
        differs = tables[rows[left], columns] != tables[others[left], columns]
        ends = differs.any(axis=1)
        common[left[ends]] = np.minimum(common[left[ends]], first + differs[ends].argmax(axis=1))
        first, width = first + width, 2 * width
        left = left[~ends & (common[left] > first)]
    return common


def _best_groups(levels: list[_Level], page_size: int, cost: PrefixCost) -> PrefixGroups:
    """Return the nodes, no two of them on one path, that save most in total."""
    uses: list[npt.NDArray[np.bool_]] = []  # deepest level first, ignoring the levels above
    # Most that a node saves, by itself or by the best nodes below it.
    best: npt.NDArray[np.float64] = np.zeros(0)
    for index in range(len(levels) - 1, -1, -1):
        level = levels[index]
        below = np.zeros(len(level.sizes))
        if index + 1 < len(levels):
            below += np.bincount(levels[index + 1].parents, best, len(level.sizes))
        own = cost.saved(level.sizes, level.pages * page_size)
        uses.append((own > 0) & (own >= below))
        best = np.maximum(np.maximum(own, below), 0)
    members: list[_Ints] = []
    sizes: list[_Ints] = []
    pages: list[_Ints] = []
    covered = np.zeros(1, bool)  # nodes of the level above that are used or below a used one
    for level, use in zip(levels, reversed(uses), strict=True):
        covered = covered[level.parents]
        use &= ~covered
        members.append(level.rows[np.repeat(use, level.sizes)])
        sizes.append(level.sizes[use])
        pages.append(level.pages[use])
        covered |= use
    if not levels:
        return NO_GROUPS
    return PrefixGroups(
        members=np.concatenate(members),
        sizes=np.concatenate(sizes),
        prefix_lens=np.concatenate(pages) * page_size,
    )
