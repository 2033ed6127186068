"""Room on a device for the adapters of a step, where kernels find them.

There are as many slots as a step may have adapters, at fixed addresses, so that a captured launch
finds whatever adapter is there when it is replayed. Those used last stay. An adapter's matrices lie
one behind the other, with its own ranks; a table beside them says where those of each product are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection

import attrs
import numpy as np
import torch

from gpu._util.upload import pinned
from gpu.kernels.lora import ENTRY, ProductShape, padded_rank, partial_numbers
from gpu.lora.reading import LoraWeights, LowRankUpdate
from gpu.lora.store import AdapterStore
from gpu.weights.blocks import FLOAT32
from gpu.weights.packed_modules import PACKED_MODULES, packed_shapes
from gpu.weights.tensors import as_tensor
from trioserve.model_files import ModelConfig


def product_shapes(config: ModelConfig) -> dict[str, ProductShape]:
    """Return the products that adapters may have updates of, by name; they are the same in every
    layer.

    Only where each layer has experts there is no MLP among them.
    """
    return {
        product: ProductShape(shape.inputs, tuple(shape.outputs.values()))
        for layer in range(config.num_layers)
        for product, shape in packed_shapes(config, layer).items()
    }


@attrs.frozen(eq=False)
class PackedAdapter:
    """An adapter on the host, as it stands in a slot."""

    numbers: torch.Tensor  # flat
    entries: torch.Tensor  # [layers * products, 4] int64, rows of ENTRY

    @classmethod
    def of(
        cls, adapter: LoraWeights, config: ModelConfig, dtype: torch.dtype, device: torch.device
    ) -> PackedAdapter:
        """Return ``adapter`` in ``dtype``, ready to be copied to ``device``."""
        entries = np.zeros(config.num_layers * len(PACKED_MODULES), ENTRY)
        pieces: list[torch.Tensor] = []
        end = 0
        for index, entry in enumerate(entries):
            layer, product = divmod(index, len(PACKED_MODULES))
            parts = [*PACKED_MODULES.values()][product]
            updates = [adapter.updates.get((layer, part)) for part in parts]
            for part, update in enumerate(updates):
                entry[f"rank{part}"] = 0 if update is None else padded_rank(update.rank)
            for name, form in (("a", _a), ("b", _b)):
                entry[name] = end
                own = [form(update).to(dtype).flatten() for update in updates if update is not None]
                end += sum(piece.numel() for piece in own)
                pieces += own
        words = torch.from_numpy(entries.view(np.int64).reshape(len(entries), -1))
        # A stage may have no layer with updates.
        numbers = torch.cat(pieces) if pieces else torch.zeros(1, dtype=dtype)
        return cls(pinned(numbers, device), pinned(words, device))


def _a(update: LowRankUpdate) -> torch.Tensor:
    """[padded rank, inputs]."""
    matrix = as_tensor(update.a)
    padding = padded_rank(update.rank) - update.rank
    return torch.nn.functional.pad(matrix, (0, 0, 0, padding))


def _b(update: LowRankUpdate) -> torch.Tensor:
    """[outputs, padded rank], with the scale in it."""
    matrix = as_tensor(update.b.astype(FLOAT32) * np.float32(update.scale))
    return torch.nn.functional.pad(matrix, (0, padded_rank(update.rank) - update.rank))


MakeStore = Callable[
    [ModelConfig, int, Callable[[LoraWeights], PackedAdapter]], AdapterStore[PackedAdapter]
]


class AdapterSlots:
    """The adapters of a model, and on ``device`` those that were used last.

    Args:
        config: of the model.
        max_rank: the largest rank that is served.
        dtype: of the model.
        device: of the model.
        count: number of slots, at least as many as a step has adapters.
        make_store: returns the store of what it is given, a function that packs an adapter; by
            default one of whole adapters.
    """

    def __init__(
        self,
        config: ModelConfig,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        count: int,
        make_store: MakeStore = AdapterStore,
    ) -> None:
        self.store = make_store(
            config, max_rank, lambda adapter: PackedAdapter.of(adapter, config, dtype, device)
        )
        self.count = count
        self.numbers = torch.zeros(
            count, _numbers_per_slot(config, max_rank), dtype=dtype, device=device
        )
        """[count, numbers of an adapter of the largest rank]."""
        self.entries = torch.zeros(
            count, config.num_layers * len(PACKED_MODULES), 4, dtype=torch.int64, device=device
        )
        """[count, layers * products, 4], rows of ENTRY."""
        self._slots: OrderedDict[int, int] = OrderedDict()

    def bring(self, wanted: Collection[int]) -> list[int]:
        """Load the adapters ``wanted``, by number, into slots; return their slots.

        What is copied is in the order of the current stream: behind the steps that use what a slot
        had before, and before the one that is queued next. The host doesn't wait for it.
        """
        for number in wanted:
            if number in self._slots:
                self._slots.move_to_end(number)
        for number in wanted:
            if number not in self._slots:
                slot = self._slots[number] = self._free_slot()
                adapter = self.store[number]
                self.numbers[slot, : adapter.numbers.numel()].copy_(
                    adapter.numbers, non_blocking=True
                )
                self.entries[slot].copy_(adapter.entries, non_blocking=True)
        return [self._slots[number] for number in wanted]

    def _free_slot(self) -> int:
        """Return a free slot; if there is none, evict the least recently used adapter."""
        for gone in [number for number in self._slots if number not in self.store]:
            del self._slots[gone]
        if len(self._slots) == self.count:
            self._slots.popitem(last=False)
        return min(set(range(self.count)) - set(self._slots.values()))

    @staticmethod
    def device_bytes(
        config: ModelConfig, max_rank: int, dtype: torch.dtype, count: int, max_tokens: int
    ) -> int:
        """Return the bytes of all slots and of the partial results of a step of so many tokens."""
        if max_rank == 0:
            return 0
        between = partial_numbers(product_shapes(config).values(), max_tokens, max_rank)
        entries = config.num_layers * len(PACKED_MODULES) * ENTRY.itemsize
        per_slot = _numbers_per_slot(config, max_rank) * dtype.itemsize + entries
        return count * per_slot + between * torch.float32.itemsize


def _numbers_per_slot(config: ModelConfig, max_rank: int) -> int:
    sizes = (
        shape.inputs + outputs
        for shape in product_shapes(config).values()
        for outputs in shape.outputs
    )
    return config.num_layers * padded_rank(max_rank) * sum(sizes)
