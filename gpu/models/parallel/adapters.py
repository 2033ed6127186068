"""Adapters that torch computes on several ranks; :mod:`.adapter_parts` has the part of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import torch

from gpu.lora.torch_adapters import TokenGroup, TorchAdapter, token_groups
from gpu.models.parallel.adapter_parts import SentAdapters, adapter_of, adapter_part
from gpu.models.parallel.link import RankLink
from gpu.models.parallel.model_part import ModelPart
from gpu.models.parallel.steps import LoadOnRanks, UnloadOnRanks, encode_step
from gpu.slots import Row


class LeadingAdapters:
    """The adapters on rank 0, which sends them to the others before the next step."""

    def __init__(self, part: ModelPart, link: RankLink, max_rank: int, dtype: torch.dtype) -> None:
        own = part.config()
        self.store = SentAdapters[TorchAdapter](
            part.whole,
            max_rank,
            lambda adapter: TorchAdapter.of(adapter_part(adapter, part), own, dtype),
        )
        self._link = link

    def groups(self, rows: Sequence[Row]) -> list[TokenGroup]:
        """Return the tokens of ``rows`` by adapter; the other ranks have these adapters then."""
        with self._link.in_step():
            for message in self.store.take():
                self._link.send(encode_step(message))
        return token_groups(self.store, rows)


@attrs.define(eq=False)
class FollowingAdapters:
    """The adapters on another rank."""

    _part: ModelPart
    _dtype: torch.dtype
    _adapters: dict[int, TorchAdapter] = attrs.field(init=False, factory=dict)

    def load(self, message: LoadOnRanks) -> None:
        """Hold this rank's part of an adapter."""
        self._adapters[message.number] = TorchAdapter.of(
            adapter_part(adapter_of(message), self._part), self._part.config(), self._dtype
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
