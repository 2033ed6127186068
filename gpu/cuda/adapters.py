"""A step's adapters as the kernels take them: packed on the host, launched behind each product."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gpu.cuda.step_buffer import StepBuffer
from gpu.kernels import KernelLoader
from gpu.kernels.lora import TILE, TILE_NUMBERS, LoraUpdate, max_tiles
from gpu.lora.adapter_slots import AdapterSlots, product_shapes
from gpu.lora.groups import tokens_by_adapter
from gpu.slots import Row
from gpu.weights.packed_modules import PACKED_MODULES
from trioserve.model_files import ModelConfig


class CudaAdapters:
    """:class:`gpu.lora.updates.ProductUpdates` of all adapters of a step: two launches a product.

    :meth:`regions` of the step buffer belong to it.

    Raises:
        ValueError: a size that the kernels aren't made for.
    """

    @staticmethod
    def regions(max_tokens: int, num_slots: int) -> dict[str, int]:
        """Return what it needs of the step buffer."""
        return {
            "adapter_tokens": max_tokens,
            "adapter_tiles": TILE_NUMBERS * max_tiles(max_tokens, num_slots),
        }

    def __init__(
        self,
        loader: KernelLoader,
        buffer: StepBuffer,
        adapter_slots: AdapterSlots,
        config: ModelConfig,
    ) -> None:
        self._buffer = buffer
        self._adapter_slots = adapter_slots
        self._shapes = product_shapes(config)
        self._index = {product: index for index, product in enumerate(PACKED_MODULES)}
        self.brought: list[tuple[int, int]] = []
        """Numbers and slots of the adapters of the step that was packed last, in their order."""
        self.num_tiles = 0
        self._update = LoraUpdate(
            loader,
            shapes=self._shapes.values(),
            places=adapter_slots.numbers,
            entries=adapter_slots.entries,
            tiles=buffer["adapter_tiles"],
            tokens=buffer["adapter_tokens"],
            max_rank=adapter_slots.store.max_rank,
        )

    def pack(self, rows: Sequence[Row], *, padded_to: int = 0) -> None:
        """Set the launches of a step of ``rows``, before the upload of the step buffer.

        Their tokens stand one row's after the other's. ``padded_to`` tokens is the size of the
        graph that is replayed, if one is.
        """
        tokens = tokens_by_adapter(rows)
        adapter_slots = self._adapter_slots.bring(tokens.keys())
        self.brought = list(zip(tokens, adapter_slots, strict=True))
        tiles: list[tuple[int, int, int]] = []
        first = 0
        for slot, own in zip(adapter_slots, tokens.values(), strict=True):
            tiles += [
                (slot, first + start, min(TILE, len(own) - start))
                for start in range(0, len(own), TILE)
            ]
            first += len(own)
        self.num_tiles = (
            max_tiles(padded_to, self._adapter_slots.count) if padded_to else len(tiles)
        )
        if tokens:
            self._buffer.put("adapter_tokens", np.concatenate([*tokens.values()]))
        self._buffer.put("adapter_tiles", tiles, padded_to=TILE_NUMBERS * self.num_tiles)

    def follow(self, brought: Sequence[tuple[int, int]], num_tiles: int) -> None:
        """Set the launches of a step that another rank has packed: its adapters and its tiles."""
        slots = self._adapter_slots.bring([number for number, _ in brought])
        assert slots == [slot for _, slot in brought], "the ranks' adapters lie in other slots"
        self.num_tiles = num_tiles

    def update(self, layer: int, product: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """See :meth:`gpu.lora.updates.ProductUpdates.update`. Of the step that was packed last."""
        index = layer * len(PACKED_MODULES) + self._index[product]
        self._update.launch(index, self._shapes[product], self.num_tiles, x, y)
