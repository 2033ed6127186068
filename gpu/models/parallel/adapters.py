"""Adapters of a model that is split: each rank has its part of every update.

An update ``scale * b @ a`` is split as its projection is: ``b`` by outputs, or ``a`` by inputs.
What the ranks then add to a sum is the whole update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import torch

from gpu.lora.reading import LoraWeights, LowRankUpdate
from gpu.lora.store import AdapterStore
from gpu.lora.torch_adapters import TokenGroup, TorchAdapter, token_groups
from gpu.models.parallel.group import RankGroup
from gpu.models.parallel.model_part import ModelPart
from gpu.models.parallel.steps import (
    LoadOnRanks,
    LowRank,
    UnloadOnRanks,
    encode_step,
    numbers_of,
    packed,
)
from gpu.slots import Row


def part_of(adapter: LoraWeights, part: ModelPart) -> LoraWeights:
    """Return what the rank of ``part`` has of an adapter."""
    updates = {}
    for (layer, module), update in adapter.updates.items():
        name = f"model.layers.{layer}.{module}.weight"
        dim, own = part.cut(name, (len(update.b), update.a.shape[1]))
        a, b = (update.a[:, own], update.b) if dim else (update.a, update.b[own])
        updates[layer, module] = LowRankUpdate(a=a, b=b, scale=update.scale)
    return LoraWeights(updates=updates, checksum=adapter.checksum)


class LeadingAdapters:
    """The adapters on rank 0, which sends them to the others before the next step.

    An adapter is read by another thread than that of the steps, which alone may send.
    """

    def __init__(
        self, part: ModelPart, group: RankGroup, max_rank: int, dtype: torch.dtype
    ) -> None:
        self.store = _SentAdapters(part, max_rank, dtype)
        self._group = group

    def groups(self, rows: Sequence[Row]) -> list[TokenGroup]:
        """Return the tokens of ``rows`` by adapter; the other ranks have these adapters then."""
        with self._group.in_step():
            for message in self.store.take():
                self._group.send(encode_step(message))
        return token_groups(self.store, rows)


class _SentAdapters(AdapterStore[TorchAdapter]):
    """Rank 0's parts of the adapters, and what the other ranks haven't been told."""

    def __init__(self, part: ModelPart, max_rank: int, dtype: torch.dtype) -> None:
        own = part.config()
        super().__init__(
            part.whole,
            max_rank,
            lambda adapter: TorchAdapter.of(part_of(adapter, part), own, dtype),
        )
        self._due: list[LoadOnRanks | UnloadOnRanks] = []

    def put(self, number: int, adapter: LoraWeights) -> None:
        """See :meth:`gpu.lora.store.AdapterStore.put`."""
        super().put(number, adapter)
        self._due.append(LoadOnRanks(number, as_messages(adapter)))

    def unload(self, number: int) -> None:
        """See :meth:`gpu.lora.store.AdapterStore.unload`."""
        super().unload(number)
        self._due.append(UnloadOnRanks(number))

    def take(self) -> list[LoadOnRanks | UnloadOnRanks]:
        """Return what is due, in order, and forget it."""
        due = []
        while self._due:  # another thread may append
            due.append(self._due.pop(0))
        return due


def as_messages(adapter: LoraWeights) -> list[LowRank]:
    """Return an adapter's updates for other ranks."""
    return [
        LowRank(layer, module, packed(update.a), packed(update.b), update.scale)
        for (layer, module), update in adapter.updates.items()
    ]


@attrs.define(eq=False)
class FollowingAdapters:
    """The adapters on another rank."""

    _part: ModelPart
    _dtype: torch.dtype
    _adapters: dict[int, TorchAdapter] = attrs.field(init=False, factory=dict)

    def load(self, message: LoadOnRanks) -> None:
        """Hold this rank's part of an adapter."""
        updates = {
            (each.layer, each.module): LowRankUpdate(
                a=numbers_of(each.a), b=numbers_of(each.b), scale=each.scale
            )
            for each in message.updates
        }
        whole = LoraWeights(updates=updates, checksum="")
        self._adapters[message.number] = TorchAdapter.of(
            part_of(whole, self._part), self._part.config(), self._dtype
        )

    def unload(self, message: UnloadOnRanks) -> None:
        """Forget an adapter."""
        del self._adapters[message.number]

    def groups(self, tokens: Mapping[int, bytes]) -> list[TokenGroup]:
        """Return the groups of a step: by adapter, the places of its tokens, int64."""
        return [
            TokenGroup(
                number,
                self._adapters[number],
                torch.from_numpy(np.frombuffer(own, np.int64).copy()),
            )
            for number, own in tokens.items()
        ]
