"""A step's layout becomes the integers that the attention kernels read, in the step buffer.

Rows of one token come first and are their own tokens, so "row" and "token" are the same number for
them, and the partial results of a step are numbered token by token: first those of decode rows
(their shared prefix, then their own parts), then those of the tokens of prefill rows.
"""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt

from gpu.attention import StepLayout
from gpu.attention.prefill_items import PrefillItems, choose_tile, prefill_items
from gpu.attention.shared_prefix import PrefixCost, SharedPrefixes, prefix_tile, shared_prefixes
from gpu.attention.splits import Splits, split
from gpu.cuda.attention_limits import AttentionLimits
from gpu.cuda.step_buffer import StepBuffer
from gpu.kernels.attention_tile import TILES, tokens_per_tile


@attrs.frozen(kw_only=True)
class StepShape:
    """The grid sizes that a step's launches need, or their upper bounds in a graph."""

    num_tokens: int
    num_decode_rows: int
    num_items: dict[int | None, int]
    """Decode items by window."""
    has_partials: dict[int | None, bool]
    """True for each window with partial results to combine."""
    prefix_tile: int | None = None
    """None if no prefix is shared."""
    num_prefix_items: int = 0
    prefill_tile: int | None = None
    """None if no row has several tokens."""
    num_prefill_items: int = 0


def padded_shape(limits: AttentionLimits, num_rows: int, *, shares: bool) -> StepShape:
    """Return the shape that holds any step of up to ``num_rows`` rows of one token, to be captured.

    ``shares`` says whether such steps may have shared prefixes.
    """
    windows = limits.distinct_windows
    return StepShape(
        num_tokens=num_rows,
        num_decode_rows=num_rows,
        num_items=dict.fromkeys(windows, limits.max_decode_items(num_rows)),
        has_partials=dict.fromkeys(windows, True),
        prefix_tile=prefix_tile(num_rows, limits.group) if shares else None,
        num_prefix_items=limits.max_prefix_items(num_rows) if shares else 0,
    )


class StepPacker:
    """Packs steps into ``buffer``, which has the regions of ``limits``.

    ``cache_bytes`` are those of one element of the KV cache.
    """

    def __init__(
        self, buffer: StepBuffer, limits: AttentionLimits, *, page_size: int, cache_bytes: int
    ) -> None:
        self._buffer = buffer
        self._limits = limits
        self._page_size = page_size
        self._costs = {
            tile: PrefixCost(
                num_heads=limits.num_heads,
                num_kv_heads=limits.num_kv_heads,
                head_dim=limits.head_dim,
                cache_bytes=cache_bytes,
                rows_per_tile=tokens_per_tile(tile, limits.group),
            )
            for tile in TILES
        }

    def find_shared(self, layout: StepLayout, num_rows: int) -> SharedPrefixes | None:
        """Return the prefixes that decode rows share; None if none is worth it.

        ``num_rows`` is what the rows of one token are padded to, or their number.
        """
        limits, num_decode = self._limits, layout.num_decode_rows
        if not limits.may_share or num_decode < 2:
            return None
        shared = shared_prefixes(
            layout.block_tables[:num_decode],
            layout.context_lens[:num_decode],
            page_size=self._page_size,
            cost=self._costs[prefix_tile(num_rows, limits.group)],
            target_items=limits.prefix_target,
        )
        return shared if len(shared.items) else None

    def pack(
        self, layout: StepLayout, *, padded_to: int = 0, shared: SharedPrefixes | None = None
    ) -> StepShape:
        """Put everything that the kernels read into the step buffer.

        Args:
            layout: of the step.
            padded_to: rows of one token are padded to so many, if they are all that there is.
            shared: what :meth:`find_shared` found for the same number of rows.
        """
        limits = self._limits
        num_rows = max(len(layout.slots), padded_to)
        num_decode = max(layout.num_decode_rows, padded_to)
        assert not padded_to or layout.num_decode_rows == len(layout.slots)
        self._pack_tokens(layout, padded_to)
        prefill_tile, prefill = None, None
        if num_rows > num_decode:
            prefill_tile, prefill = self._pack_prefill(layout)
        self._pack_shared(shared)
        num_items, has_partials = {}, {}
        for index, window in enumerate(limits.distinct_windows):
            splits = self._split(layout, num_decode, window, shared)
            num_items[window] = len(splits.items)
            has_partials[window] = self._pack_splits(index, splits, prefill)
        return StepShape(
            num_tokens=max(len(layout.positions), padded_to),
            num_decode_rows=num_decode,
            num_items=num_items,
            has_partials=has_partials,
            prefix_tile=None if shared is None else prefix_tile(num_decode, limits.group),
            num_prefix_items=0 if shared is None else len(shared.items),
            prefill_tile=prefill_tile,
            num_prefill_items=0 if prefill is None else len(prefill.items),
        )

    def _pack_tokens(self, layout: StepLayout, padded_to: int) -> None:
        """Write the position of each token; a row of padding has slot and location -1."""
        put, size = self._buffer.put, self._page_size
        row_of_token = np.repeat(np.arange(len(layout.slots)), np.diff(layout.query_start))
        pages = layout.block_tables[row_of_token, layout.positions // size].astype(np.int64)
        put("slots", layout.slots, padded_to=padded_to, fill=-1)
        put("positions", layout.positions, padded_to=padded_to)
        locations = pages * size + layout.positions % size
        put("kv_locations", locations, padded_to=padded_to, fill=-1)

    def _pack_shared(self, shared: SharedPrefixes | None) -> None:
        if not self._limits.may_share:
            return
        self._buffer.put("num_prefix_items", 0 if shared is None else len(shared.items))
        if shared is not None:
            self._buffer.put("prefix_items", shared.items)
            self._buffer.put("prefix_members", shared.members)

    def _pack_prefill(self, layout: StepLayout) -> tuple[int, PrefillItems]:
        """Return the rows of several tokens, cut into items for the tile that suits them."""
        limits = self._limits
        first = layout.num_decode_rows
        query_lens = np.diff(layout.query_start)[first:]
        tile = max(TILES) if limits.batch_invariant else choose_tile(query_lens, limits.group)
        work = prefill_items(
            query_lens,
            layout.context_lens[first:],
            tokens_per_tile=tokens_per_tile(tile, limits.group),
            num_kv_heads=limits.num_kv_heads,
            num_blocks=limits.tile_blocks,
            window=limits.widest_window,
            first_row=first,
            max_partials=limits.max_prefill_partials,
        )
        self._buffer.put("query_start", layout.query_start)
        self._buffer.put("context_lens", layout.context_lens)
        self._buffer.put("prefill_items", work.items)
        return tile, work

    def _split(
        self,
        layout: StepLayout,
        num_decode: int,
        window: int | None,
        shared: SharedPrefixes | None,
    ) -> Splits:
        contexts = _padded(layout.context_lens[: layout.num_decode_rows], num_decode)
        begin = reserved = None
        if window is None and shared is not None:
            begin = _padded(shared.prefix_lens, num_decode)
            reserved = _padded(shared.num_partials, num_decode)
        return split(
            contexts,
            target_items=self._limits.decode_target,
            window=window,
            begin=begin,
            reserved=reserved,
            fixed_split=self._limits.fixed_split,
        )

    def _pack_splits(self, index: int, splits: Splits, prefill: PrefillItems | None) -> bool:
        """Return one window's decode items and all its partial results; whether there are any."""
        put = self._buffer.put
        put(f"num_items.{index}", len(splits.items))
        put(f"items.{index}", splits.items)
        partial_start = splits.partial_start
        if prefill is not None:
            following = splits.num_partials + np.cumsum(prefill.num_partials)
            partial_start = np.concatenate([partial_start, following])
        num_partials = int(partial_start[-1])
        assert num_partials <= self._limits.max_partials
        put(f"partial_start.{index}", partial_start)
        return num_partials > 0


def _padded(values: npt.NDArray[np.generic], length: int) -> npt.NDArray[np.int64]:
    """``values`` as int64, with zeros behind them up to ``length``."""
    padded = np.zeros(length, dtype=np.int64)
    padded[: len(values)] = values
    return padded
