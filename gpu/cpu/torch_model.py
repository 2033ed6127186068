"""A model and a sampler of torch's operations: the reference, and what runs everywhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from gpu.adjustments import Adjustment
from gpu.attention import Attention
from gpu.attention.layout import in_layout_order, step_layout
from gpu.cpu.model import Floats
from gpu.draws import SamplerRow
from gpu.executor import Copies, Drawn
from gpu.lora.store import AdapterStore
from gpu.lora.torch_adapters import TorchAdapter, TorchAdapters
from gpu.models.decoder import Decoder
from gpu.sampler import Sampler
from gpu.slots import Row, SlotTable

__all__ = ["TorchModel", "TorchSampler"]


class TorchModel:
    """:class:`gpu.cpu.model.CpuModel` over a decoder in any dtype.

    ``max_rank`` is the largest of the adapters that are served, 0 for none.
    """

    def __init__(self, decoder: Decoder, attention: Attention, *, max_rank: int = 0) -> None:
        self._decoder = decoder
        self._attention = attention
        self._adapters = TorchAdapters(decoder.config, max_rank, decoder.dtype)

    @property
    def adapters(self) -> AdapterStore[TorchAdapter]:
        """See :attr:`gpu.cpu.model.CpuModel.adapters`."""
        return self._adapters.store

    def replace_decoder(self, decoder: Decoder) -> None:
        """Compute with ``decoder``, of the same shape, over the same KV cache."""
        self._decoder = decoder

    @torch.inference_mode()
    def copy_pages(self, copies: Copies) -> None:
        """See :meth:`gpu.cpu.model.CpuModel.copy_pages`."""
        self._attention.copy_pages(copies)

    @torch.inference_mode()
    def forward(
        self, rows: Sequence[Row], slots: SlotTable
    ) -> tuple[torch.Tensor, npt.NDArray[np.integer]]:
        """See :meth:`gpu.cpu.model.CpuModel.forward`."""
        ordered = in_layout_order(rows)
        layout = step_layout(ordered, slots)
        tokens = np.concatenate([row.slot.tokens[row.start : row.end] for row in ordered])
        self._attention.begin(layout)
        hidden = self._decoder.forward(
            torch.from_numpy(tokens.astype(np.int64)),
            self._attention,
            self._adapters.groups(ordered),
        )
        ends = zip(ordered, layout.query_start[1:].tolist(), strict=True)
        last = {row.slot.number: end - 1 for row, end in ends}
        return hidden, np.array([last[row.slot.number] for row in rows])

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
