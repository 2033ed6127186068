"""Adapters in torch's operations: the reference, and what a CPU without kernels computes with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import torch

from gpu.lora.groups import tokens_by_adapter
from gpu.lora.reading import LoraWeights
from gpu.lora.store import AdapterStore
from gpu.slots import Row
from gpu.weights.blocks import FLOAT32
from gpu.weights.packed_modules import packed_shapes
from gpu.weights.tensors import as_tensor
from trioserve.model_files import ModelConfig


@attrs.frozen(eq=False)
class _Update:
    first: int  # column of the product's result
    a: torch.Tensor  # [rank, inputs]
    b: torch.Tensor  # [outputs, rank], with the scale in it


@attrs.frozen(eq=False)
class TorchAdapter:
    """The updates of each product that has any, by layer and the product's name."""

    updates: Mapping[tuple[int, str], tuple[_Update, ...]]

    @classmethod
    def of(cls, adapter: LoraWeights, config: ModelConfig, dtype: torch.dtype) -> TorchAdapter:
        """``adapter`` in ``dtype``, on the CPU."""
        updates: dict[tuple[int, str], tuple[_Update, ...]] = {}
        for layer in range(config.num_layers):
            for product, shape in packed_shapes(config, layer).items():
                own, first = [], 0
                for part, outputs in shape.outputs.items():
                    update = adapter.updates.get((layer, part))
                    if update is not None:
                        scaled = update.b.astype(FLOAT32) * np.float32(update.scale)
                        a, b = as_tensor(update.a).to(dtype), as_tensor(scaled).to(dtype)
                        own.append(_Update(first, a, b))
                    first += outputs
                if own:
                    updates[layer, product] = tuple(own)
        return cls(updates)


@attrs.frozen(eq=False)
class TokenGroup:
    """:class:`gpu.lora.updates.ProductUpdates` of the tokens [n] int64 that have one adapter."""

    number: int
    """Number of the adapter."""
    adapter: TorchAdapter
    tokens: torch.Tensor

    def update(self, layer: int, product: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """See :meth:`gpu.lora.updates.ProductUpdates.update`. Only this group's tokens change."""
        updates = self.adapter.updates.get((layer, product))
        if updates is None:
            return
        own = x.index_select(0, self.tokens)
        for update in updates:
            delta = own @ update.a.t() @ update.b.t()
            columns = y[:, update.first : update.first + delta.shape[1]]
            columns.index_add_(0, self.tokens, delta)


class TorchAdapters:
    """The adapters of a model on the CPU.

    Args:
        config: of the model.
        max_rank: the largest rank that is served.
        dtype: of the model.
    """

    def __init__(self, config: ModelConfig, max_rank: int, dtype: torch.dtype) -> None:
        self.store = AdapterStore[TorchAdapter](
            config, max_rank, lambda adapter: TorchAdapter.of(adapter, config, dtype)
        )

    def groups(self, rows: Sequence[Row]) -> list[TokenGroup]:
        """Return the indices of the tokens of ``rows``, which are in their order, by adapter."""
        return token_groups(self.store, rows)


def token_groups(store: Mapping[int, TorchAdapter], rows: Sequence[Row]) -> list[TokenGroup]:
    """Return the tokens of ``rows``, which stand in their order, by adapter."""
    if not store:
        return []
    return [
        TokenGroup(number, store[number], torch.from_numpy(own.astype(np.int64)))
        for number, own in tokens_by_adapter(rows).items()
    ]
