"""Adapters in torch's operations: the reference on a CPU, and what a GPU computes with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import torch

from gpu.lora.groups import tokens_by_adapter
from gpu.lora.products import PRODUCTS
from gpu.lora.reading import Adapter
from gpu.lora.store import AdapterStore
from gpu.slots import Row
from gpu.upload import upload
from gpu.weights import FLOAT32, expected_tensors
from gpu.weights.tensors import as_tensor
from trioserve.model_files import ModelConfig

__all__ = ["TokenGroup", "TorchAdapter", "TorchAdapters"]


@attrs.frozen(eq=False)
class _Update:
    first: int  # column of the product's result
    a: torch.Tensor  # [rank, inputs]
    b: torch.Tensor  # [outputs, rank], with the scale in it

    def to(self, device: torch.device) -> _Update:
        return _Update(self.first, self.a.to(device), self.b.to(device))


@attrs.frozen(eq=False)
class TorchAdapter:
    """The updates of each product that has any, by layer and the product's name."""

    updates: Mapping[tuple[int, str], tuple[_Update, ...]]

    @classmethod
    def of(cls, adapter: Adapter, config: ModelConfig, dtype: torch.dtype) -> TorchAdapter:
        """``adapter`` in ``dtype``, on the CPU."""
        shapes = expected_tensors(config)
        updates: dict[tuple[int, str], tuple[_Update, ...]] = {}
        for layer in range(config.num_layers):
            for product, parts in PRODUCTS.items():
                own, first = [], 0
                for part in parts:
                    update = adapter.updates.get((layer, part))
                    if update is not None:
                        scaled = update.b.astype(FLOAT32) * np.float32(update.scale)
                        a, b = as_tensor(update.a).to(dtype), as_tensor(scaled).to(dtype)
                        own.append(_Update(first, a, b))
                    first += shapes[f"model.layers.{layer}.{part}.weight"][0]
                if own:
                    updates[layer, product] = tuple(own)
        return cls(updates)

    def to(self, device: torch.device) -> TorchAdapter:
        """The same on ``device``."""
        moved = {key: tuple(each.to(device) for each in own) for key, own in self.updates.items()}
        return TorchAdapter(moved)


@attrs.frozen(eq=False)
class TokenGroup:
    """The tokens [n] int64 of a step that have one adapter."""

    adapter: TorchAdapter
    tokens: torch.Tensor

    def update(self, layer: int, product: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add to the product's result ``y`` [T, outputs] what the adapter makes of ``x`` [T, in].

        Only this group's tokens change.
        """
        updates = self.adapter.updates.get((layer, product))
        if updates is None:
            return
        own = x.index_select(0, self.tokens)
        for update in updates:
            delta = own @ update.a.t() @ update.b.t()
            columns = y[:, update.first : update.first + delta.shape[1]]
            columns.index_add_(0, self.tokens, delta)


class TorchAdapters:
    """The adapters of a model in ``dtype``, and copies of the last used ones on its device.

    Args:
        config: of the model.
        max_rank: the largest rank that is served.
        dtype: of the model.
        device: of the model.
        most: copies on the device, at least as many as a step has adapters.
    """

    def __init__(
        self,
        config: ModelConfig,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        most: int,
    ) -> None:
        self.store = AdapterStore[TorchAdapter](
            config, max_rank, lambda adapter: TorchAdapter.of(adapter, config, dtype)
        )
        self._config = config
        self._dtype = dtype
        self._device = device
        self._most = most
        self._copies: OrderedDict[int, TorchAdapter] = OrderedDict()

    def groups(self, rows: Sequence[Row]) -> list[TokenGroup]:
        """The tokens of ``rows``, whose tokens stand in their order, by adapter."""
        if not self.store:
            return []
        tokens = tokens_by_adapter(rows)
        for number in tokens.keys() & self._copies.keys():
            self._copies.move_to_end(number)
        return [
            TokenGroup(self._on_device(number), upload(own.astype(np.int64), self._device))
            for number, own in tokens.items()
        ]

    def device_bytes(self, max_tokens: int) -> int:
        """What a device needs for them: all copies, and what a step of so many tokens makes."""
        rank = self.store.max_rank
        if rank == 0:
            return 0
        linears = [
            shape
            for name, shape in expected_tensors(self._config).items()
            if name.endswith("_proj.weight")
        ]
        # Of a product there are at a time a token's x, what A makes of it, and what B does.
        per_token = rank + max(outputs + inputs for outputs, inputs in linears)
        numbers = self._most * rank * sum(map(sum, linears)) + max_tokens * per_token
        return numbers * self._dtype.itemsize

    def _on_device(self, number: int) -> TorchAdapter:
        if self._device.type == "cpu":
            return self.store[number]
        copy = self._copies.get(number)
        if copy is None:
            for gone in [each for each in self._copies if each not in self.store]:
                del self._copies[gone]
            while len(self._copies) >= self._most:
                self._copies.popitem(last=False)
            copy = self._copies[number] = self.store[number].to(self._device)
        return copy
