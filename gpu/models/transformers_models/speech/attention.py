"""Attention over tokens in pages, and over the audio that each slot transcribes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import attrs
import torch

from gpu.models.transformers_models.attention import LayerShape, PagedLayers
from gpu.slots import Row, Slot, SlotTable
from trioserve.protocol.embeddings import EmbeddingRows

KeysAndValues: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of a layer, each [heads, S, head_dim]."""
Layers: TypeAlias = Sequence[KeysAndValues]
_SILENCE = b""
"""Name of the audio of slots that bring none, such as the one of the warm-up."""


@attrs.define(eq=False)
class HeardAudio:
    """Audio of the slots, projected for each layer. Slots with the same audio share it.

    A slot brings its audio whenever it is opened, and keeps it until its first step. Audio of
    closed slots stays until its room is needed.

    Args:
        project: Makes the keys and values of all layers of encoder states [S, E].
        num_states: S.
        width: E.
        capacity: Most audio that is kept, at least as many as there are slots.
    """

    _project: Callable[[torch.Tensor], Layers]
    _num_states: int
    _width: int
    _capacity: int
    _heard: dict[bytes, Layers] = attrs.field(init=False, factory=dict)
    """By the digest of the audio, that of longest ago first."""
    _of_slot: dict[Slot, bytes] = attrs.field(init=False, factory=dict)
    """Digest of the audio of each slot."""

    def __len__(self) -> int:
        return len(self._heard)

    def of(self, rows: Iterable[Row], open_slots: Iterable[Slot]) -> list[Layers]:
        """Return the keys and values for each of ``rows``."""
        known = set(open_slots)
        self._of_slot = {slot: name for slot, name in self._of_slot.items() if slot in known}
        return [self._layers_of(row.slot) for row in rows]

    def _layers_of(self, slot: Slot) -> Layers:
        name = self._of_slot.get(slot)
        if name is None:
            data = slot.embeddings[0].rows if slot.embeddings else _SILENCE
            name = hashlib.blake2b(data, digest_size=16).digest()
            self._of_slot[slot] = name
            if name not in self._heard:
                self._make_room()
                self._heard[name] = self._project(self._states_of(slot))
        return self._heard[name]

    def _make_room(self) -> None:
        used = set(self._of_slot.values())
        for name in [name for name in self._heard if name not in used]:
            if len(self._heard) < self._capacity:
                return
            del self._heard[name]

    def _states_of(self, slot: Slot) -> torch.Tensor:
        """Return the encoder states [S, E] that a slot brings; zeros if it brings none."""
        if not slot.embeddings:
            return torch.zeros(self._num_states, self._width)
        (given,) = slot.embeddings
        return states_in(given, self._width)


def states_in(given: EmbeddingRows, width: int) -> torch.Tensor:
    """Return encoder states [S, E] of the width E, as they were sent."""
    numbers = given.numbers(width)
    if given.number_format == "bfloat16":  # which torch doesn't take from NumPy
        return torch.from_numpy(numbers.view("<i2").copy()).view(torch.bfloat16)
    return torch.from_numpy(numbers.copy())


class SpeechAttention(PagedLayers):
    """The attention of all layers, over the tokens and over the audio.

    Args:
        layers: Shapes of the layers' attention over the tokens.
        heard: Audio of the slots.
        page_size, num_pages, dtype: As for :class:`PagedLayers`.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        heard: HeardAudio,
        *,
        page_size: int,
        num_pages: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(layers, page_size=page_size, num_pages=num_pages, dtype=dtype)
        self._heard = heard
        self._audio: list[Layers] = []
        self._counts: list[int] = []

    def begin_audio(self, rows: Sequence[Row], slots: SlotTable) -> None:
        """Take the audio of a step, whose ``rows`` are in the order of its layout."""
        self._audio = self._heard.of(rows, slots)
        self._counts = [row.num_computed for row in rows]

    def attend_audio(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Return the attention of ``query`` [heads, T, head_dim], scaled already, of that shape."""
        attended = [
            torch.nn.functional.scaled_dot_product_attention(own, *audio[layer], scale=1.0)
            for own, audio in zip(torch.split(query, self._counts, 1), self._audio, strict=True)
        ]
        return torch.cat(attended, dim=1)
