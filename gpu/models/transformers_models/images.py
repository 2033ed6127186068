"""Attention over images whose tokens see each other, those behind them as well as those before.

A step computes all tokens of such an image that aren't cached. Cached ones have seen the others,
too, because they were computed with them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from gpu.attention import StepLayout
from gpu.attention.torch_cpu import TorchCpuAttention
from trioserve.protocol.embeddings import ImageGrid


class ImageAttention(TorchCpuAttention):
    """Causal attention, but for the tokens of :attr:`images`.

    A window limits how far such a token sees back, and not how far it sees ahead.
    """

    images: Mapping[int, Sequence[ImageGrid]] = {}
    """Images whose tokens see each other, by the numbers of slots."""

    def _chunks(self, layout: StepLayout, tables: torch.Tensor, window: int | None) -> list[Any]:
        chunks: list[Any] = super()._chunks(layout, tables, window)
        rows = range(layout.num_decode_rows, len(layout.context_lens))
        for place, row in enumerate(rows):
            images = self.images.get(int(layout.slots[row]), ())
            if images:
                chunk, stop = chunks[place], int(layout.context_lens[row])
                chunks[place] = attrs.evolve(chunk, mask=self._mask_with(images, chunk, stop))
        return chunks

    def _mask_with(self, images: Sequence[ImageGrid], chunk: Any, stop: int) -> torch.Tensor | None:
        """Return the mask [tokens, keys] of a chunk with images that ends before ``stop``."""
        queries = torch.arange(stop - (chunk.tokens.stop - chunk.tokens.start), stop)
        keys = torch.arange(stop - (chunk.keys.stop - chunk.keys.start), stop)
        ahead = keys > queries[:, None]
        mask: torch.Tensor | None = chunk.mask
        for image in images:
            if image.stop <= int(queries[0]) or image.start >= stop:
                continue
            assert image.stop <= stop, "a step ends within an image"
            if mask is None:
                mask = torch.zeros(ahead.shape, dtype=self._shape.dtype)
                mask.masked_fill_(ahead, -math.inf)
            of_image = [(each >= image.start) & (each < image.stop) for each in (queries, keys)]
            mask = mask.masked_fill(of_image[0][:, None] & of_image[1] & ahead, 0)
        return mask
