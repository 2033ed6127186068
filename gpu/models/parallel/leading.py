"""Rank 0's decoder and attention: each call goes to the other ranks first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch

from gpu.attention import Attention, StepLayout
from gpu.executor import Copies
from gpu.lora.torch_adapters import TokenGroup
from gpu.models.decoder import Decoder
from gpu.models.parallel.layouts import compute
from gpu.models.parallel.link import RankLink
from gpu.models.parallel.steps import ComputeLogits, CopyPages, encode_step
from gpu.models.step_embeddings import StepEmbeddings


class LeadingAttention:
    """The attention of rank 0."""

    def __init__(self, attention: Attention, link: RankLink) -> None:
        self.own = attention
        self.layout: StepLayout | None = None
        """Layout of the step that has begun."""
        self._link = link

    def copy_pages(self, copies: Copies) -> None:
        """Copy pages on all ranks."""
        with self._link.in_step():
            self._link.send(encode_step(CopyPages(copies.tobytes())))
            self.own.copy_pages(copies)

    def page(self, number: int) -> list[torch.Tensor]:
        """Refuse: a page's content is on all ranks."""
        raise AssertionError("pages of several ranks don't leave them")

    def begin(self, layout: StepLayout) -> None:
        """See :meth:`gpu.attention.Attention.begin`; the other ranks do it with the tokens."""
        self.layout = layout
        self.own.begin(layout)


class LeadingDecoder:
    """The decoder of rank 0: :class:`gpu.cpu.torch_model.TorchDecoder`.

    With several stages this is the first one, which has neither the hidden states nor their logits.
    """

    def __init__(self, decoder: Decoder, link: RankLink) -> None:
        self._decoder = decoder
        self._link = link

    def forward(
        self,
        tokens: torch.Tensor,
        attention: LeadingAttention,
        adapted: Sequence[TokenGroup] = (),
        embedded: StepEmbeddings | None = None,
    ) -> torch.Tensor:
        """Return the hidden states [T, E] of ``tokens`` [T] int64, the same on all ranks."""
        assert attention.layout is not None
        places = {each.number: each.tokens.numpy() for each in adapted}
        with self._link.in_step():
            step = compute(tokens.numpy(), attention.layout, places, embedded)
            self._link.send(encode_step(step))
            hidden = self._decoder.forward(tokens, attention.own, adapted, embedded)
            if self._link.stages is not None:
                self._link.stages.send(raw(hidden))
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [R, V] of hidden states [R, E]."""
        with self._link.in_step():
            message = ComputeLogits(raw(hidden.contiguous()).tobytes(), len(hidden))
            self._link.send(encode_step(message))
            logits = self._decoder.logits(hidden)
        return logits


def raw(hidden: torch.Tensor) -> npt.NDArray[Any]:
    """Return the bytes of contiguous states, in the same memory."""
    found: npt.NDArray[Any] = hidden.view(torch.uint8).numpy()
    return found
