"""A model and a sampler of torch's operations: the reference, and what runs everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from gpu.attention import StepLayout
from gpu.attention.kv_cache import content_of, fill
from gpu.attention.layout import ends_of, in_layout_order, step_layout
from gpu.cpu.model import Floats
from gpu.executor import Content, Copies
from gpu.lora.store import AdapterStore
from gpu.lora.torch_adapters import TokenGroup, TorchAdapter, TorchAdapters
from gpu.models.parallel.adapters import LeadingAdapters
from gpu.models.rotary_positions import positions_of
from gpu.models.step_embeddings import StepEmbeddings, embeddings_of
from gpu.sampling.adjustments import Adjustment
from gpu.sampling.drawn import Drawn
from gpu.sampling.sampler import Sampler
from gpu.sampling.sampler_io import SamplerRow
from gpu.slots import Row, SlotTable


class StepAttention(Protocol):
    """The attention of a model as its executor sees it; see :mod:`gpu.attention`."""

    def copy_pages(self, copies: Copies) -> None:
        """Copy pages, all layers of each, one after the other."""

    def page(self, number: int) -> list[torch.Tensor]:
        """Return views of a page's bytes in all layers."""
        ...

    def begin(self, layout: StepLayout) -> None:
        """Prepare for the layers of one step."""


A = TypeVar("A", bound=StepAttention)
A_contra = TypeVar("A_contra", bound=StepAttention, contravariant=True)


class TorchDecoder(Protocol[A_contra]):
    """Weights and a forward pass over one kind of attention."""

    def forward(
        self,
        tokens: torch.Tensor,
        attention: A_contra,
        adapted: Sequence[TokenGroup] = (),
        embedded: StepEmbeddings | None = None,
    ) -> torch.Tensor:
        """Return the hidden states [T, E] of ``tokens`` [T]; ``attention`` has begun the step."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [R, V] that follow from rows [R, E] of hidden states."""
        ...


class TorchModel(Generic[A]):
    """:class:`gpu.cpu.model.CpuModel` over a decoder in any dtype.

    ``adapters`` are those that rows may have; None if none are served. ``has_mrope`` says whether
    tokens have rotary positions of their own.
    """

    def __init__(
        self,
        decoder: TorchDecoder[A],
        attention: A,
        adapters: TorchAdapters | LeadingAdapters | None = None,
        *,
        has_mrope: bool = False,
    ) -> None:
        self._decoder = decoder
        self._attention = attention
        self._adapters = adapters
        self._has_mrope = has_mrope

    @property
    def adapters(self) -> AdapterStore[TorchAdapter] | None:
        """See :attr:`gpu.cpu.model.CpuModel.adapters`."""
        return None if self._adapters is None else self._adapters.store

    def replace_decoder(self, decoder: TorchDecoder[A]) -> None:
        """Compute with ``decoder``, of the same shape, over the same KV cache."""
        self._decoder = decoder

    @torch.inference_mode()
    def copy_pages(self, copies: Copies) -> None:
        """See :meth:`gpu.cpu.model.CpuModel.copy_pages`."""
        self._attention.copy_pages(copies)

    def begin_transfer(self) -> None:
        """Do nothing: all earlier steps are computed."""

    def read_page(self, number: int) -> Content:
        """See :meth:`gpu.cpu.model.CpuModel.read_page`."""
        return content_of(self._attention.page(number))

    def write_page(self, number: int, content: Content) -> None:
        """See :meth:`gpu.cpu.model.CpuModel.write_page`."""
        fill(self._attention.page(number), content)

    @torch.inference_mode()
    def forward(
        self, rows: Sequence[Row], slots: SlotTable
    ) -> tuple[torch.Tensor, npt.NDArray[np.integer]]:
        """See :meth:`gpu.cpu.model.CpuModel.forward`."""
        ordered = in_layout_order(rows)
        layout = step_layout(ordered, slots, positions_of(ordered) if self._has_mrope else None)
        tokens = np.concatenate([row.slot.span(row.start, row.stop) for row in ordered])
        self._attention.begin(layout)
        hidden = self._hidden(torch.from_numpy(tokens.astype(np.int64)), ordered, layout, slots)
        return hidden, ends_of(rows, ordered, layout)

    def _hidden(
        self, tokens: torch.Tensor, rows: Sequence[Row], layout: StepLayout, slots: SlotTable
    ) -> torch.Tensor:
        """Return the hidden states [T, E] of ``tokens`` [T], those of ``rows`` in their order."""
        return self._decoder.forward(
            tokens,
            self._attention,
            [] if self._adapters is None else self._adapters.groups(rows),
            embeddings_of(rows, layout.query_start, slots.embedding_width),
        )

    def floats(self, hidden: torch.Tensor) -> Floats:
        """See :meth:`gpu.cpu.model.CpuModel.floats`."""
        floats: Floats = hidden.float().numpy()
        return floats

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, rows: npt.NDArray[np.integer] | None = None) -> Floats:
        """See :meth:`gpu.cpu.model.CpuModel.logits`."""
        if rows is not None:
            hidden = hidden.index_select(0, torch.from_numpy(rows))
        logits: Floats = self._decoder.logits(hidden).float().contiguous().numpy()
        return logits

    def most_probable(
        self, hidden: torch.Tensor, rows: npt.NDArray[np.integer]
    ) -> npt.NDArray[np.int32] | None:
        """See :meth:`gpu.cpu.model.CpuModel.most_probable`."""
        return None


class TorchSampler:
    """:class:`gpu.cpu.model.CpuSampler` by torch's sampler for the CPU."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    @property
    def vocab_size(self) -> int:
        """See :attr:`gpu.cpu.model.CpuSampler.vocab_size`."""
        return self._sampler.vocab_size

    def sample(
        self, logits: Floats, rows: Sequence[SamplerRow], adjustment: Adjustment | None = None
    ) -> Drawn:
        """See :meth:`gpu.cpu.model.CpuSampler.sample`."""
        sampled = self._sampler.sample(torch.from_numpy(logits), rows, adjustment)
        return Drawn(
            tokens=sampled.tokens.numpy().astype(np.int32),
            logprobs=None if sampled.logprobs is None else sampled.logprobs.numpy(),
            top=sampled.top,
        )
