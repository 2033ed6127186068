"""Adapters of a model that is split: the part of each rank, and how the others come by theirs.

An update ``scale * b @ a`` is split as its projection is: ``b`` by outputs, or ``a`` by inputs.
What the ranks then add to a sum is the whole update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from gpu.lora.reading import LoraWeights, LowRankUpdate
from gpu.lora.store import AdapterStore
from gpu.models.parallel.model_part import ModelPart
from gpu.models.parallel.steps import LoadOnRanks, LowRank, UnloadOnRanks, numbers_of, packed
from trioserve.model_files import ModelConfig

T = TypeVar("T")


def adapter_part(adapter: LoraWeights, part: ModelPart) -> LoraWeights:
    """Return what the rank of ``part`` has of an adapter."""
    updates = {}
    for (layer, module), update in adapter.updates.items():
        own_layer = part.layer_of(layer)
        if own_layer is None:
            continue
        name = f"model.layers.{layer}.{module}.weight"
        dim, own = part.cut(name, (len(update.b), update.a.shape[1]))
        a, b = (update.a[:, own], update.b) if dim else (update.a, update.b[own])
        updates[own_layer, module] = LowRankUpdate(a=a, b=b, scale=update.scale)
    return LoraWeights(updates=updates, checksum=adapter.checksum)


class SentAdapters(AdapterStore[T]):
    """Rank 0's parts of the adapters, and what the other ranks haven't been told.

    An adapter is read by another thread than that of the steps, which alone may send.
    """

    def __init__(
        self, config: ModelConfig, max_rank: int, pack: Callable[[LoraWeights], T]
    ) -> None:
        super().__init__(config, max_rank, pack)
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


def adapter_of(message: LoadOnRanks) -> LoraWeights:
    """Return the whole adapter of a message; another rank doesn't need its checksum."""
    updates = {
        (each.layer, each.module): LowRankUpdate(
            a=numbers_of(each.a), b=numbers_of(each.b), scale=each.scale
        )
        for each in message.updates
    }
    return LoraWeights(updates=updates, checksum="")
