"""The sizes of the CUDA attention's buffers: how much work the largest step may have."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from gpu.attention import shared_prefix as prefix
from gpu.attention.prefill_items import ITEM_FIELDS
from gpu.attention.splits import max_items
from gpu.kernels.attention_tile import TILES, tokens_per_tile
from gpu.kernels.decode_attention import BLOCKS_PER_MULTIPROCESSOR

# What the tiles of prefill_attention and prefix_attention leave room for on a multiprocessor.
TILE_BLOCKS_PER_MULTIPROCESSOR = 2
# With a fixed split a row has at most so many parts, and a part no fewer positions.
MOST_FIXED_PARTS = 32
SMALLEST_FIXED_PART = 512


@attrs.frozen(kw_only=True)
class AttentionLimits:
    """The model's heads, the largest step, and how steps may be cut into work items."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: Sequence[int | None]
    """The windows of all layers; each different one has work items of its own."""
    max_rows: int
    max_tokens: int
    max_model_len: int
    num_multiprocessors: int
    batch_invariant: bool = False
    """Cut every row alike in every batch."""
    has_mrope: bool = False
    """Tokens have rotary positions of their own."""

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def distinct_windows(self) -> list[int | None]:
        """Each window once, in the order of the layers."""
        return list(dict.fromkeys(self.windows))

    @property
    def widest_window(self) -> int | None:
        """The largest window of all layers; None if one layer sees everything."""
        return None if None in self.windows else max(size for size in self.windows if size)

    @property
    def may_share(self) -> bool:
        """True if decode rows may attend to a shared prefix together, in some layer."""
        return None in self.windows and self.max_rows > 1 and not self.batch_invariant

    @property
    def fixed_split(self) -> int | None:
        """Positions of a decode row's part if the batch has no say in it."""
        if not self.batch_invariant:
            return None
        return max(SMALLEST_FIXED_PART, -(-self.max_model_len // (MOST_FIXED_PARTS * 64)) * 64)

    @property
    def decode_target(self) -> int:
        """Decode items that fill the GPU once."""
        return max(1, self.num_multiprocessors * BLOCKS_PER_MULTIPROCESSOR // self.num_kv_heads)

    @property
    def tile_blocks(self) -> int:
        """Blocks of prefill or prefix attention that the GPU runs at once."""
        return self.num_multiprocessors * TILE_BLOCKS_PER_MULTIPROCESSOR

    @property
    def prefix_target(self) -> int:
        """Prefix items that fill the GPU once."""
        return max(1, self.tile_blocks // self.num_kv_heads)

    def max_decode_items(self, num_rows: int) -> int:
        """Return the most decode items, and partial results of them, for ``num_rows`` rows."""
        return max_items(
            num_rows,
            self.decode_target,
            fixed_split=self.fixed_split,
            max_context=self.max_model_len,
        )

    def max_prefix_items(self, num_rows: int) -> int:
        """Return the most prefix items for ``num_rows`` rows."""
        return prefix.max_prefix_items(num_rows, self.prefix_target)

    @property
    def max_prefix_partials(self) -> int:
        """The most partial results of prefixes.

        A prefix is cut into at most 1 + length / share parts, where the shares of all tiles add up
        to ``prefix_target``; each part gives one result for each row of a tile.
        """
        if not self.may_share:
            return 0
        return self.max_rows + tokens_per_tile(max(TILES), self.group) * self.prefix_target

    @property
    def max_prefill_partials(self) -> int:
        """Room for the splits of short rows over long contexts: twice an even share's."""
        return 0 if self.batch_invariant else 2 * self.tile_blocks * max(TILES) // self.num_heads

    @property
    def max_prefill_items(self) -> int:
        """Whole tiles of the largest step; or splits, of which there are fewer than two waves."""
        tiles = -(-self.max_tokens // tokens_per_tile(min(TILES), self.group)) + self.max_rows
        return tiles + 2 * self.tile_blocks

    @property
    def max_partials(self) -> int:
        """Partial results of the largest step."""
        decode = self.max_decode_items(self.max_rows)
        return decode + self.max_prefix_partials + self.max_prefill_partials

    def regions(self) -> dict[str, int]:
        """Return what a step needs of the step buffer."""
        regions = {"slots": self.max_rows}
        for index in range(len(self.distinct_windows)):
            regions[f"num_items.{index}"] = 1
            regions[f"items.{index}"] = 4 * self.max_decode_items(self.max_rows)
            regions[f"partial_start.{index}"] = self.max_tokens + 1
        regions["positions"] = self.max_tokens
        regions["kv_locations"] = self.max_tokens
        if self.has_mrope:
            regions["rotary_rows"] = self.max_tokens
        if self.may_share:
            regions["num_prefix_items"] = 1
            regions["prefix_items"] = ITEM_FIELDS * self.max_prefix_items(self.max_rows)
            regions["prefix_members"] = self.max_rows
        regions["query_start"] = self.max_rows + 1
        regions["context_lens"] = self.max_rows
        regions["prefill_items"] = ITEM_FIELDS * self.max_prefill_items
        return regions
