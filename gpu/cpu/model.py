"""The seam between the executor of the CPU and what computes a model there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from gpu.attention import Attention
from gpu.executor import in_layout_order, step_layout
from gpu.models.decoder import Decoder
from gpu.slots import Row, SlotTable

__all__ = ["CpuModel", "TorchModel"]


class CpuModel(Protocol):
    """A model with its paged KV cache.

    What a method returns is valid until the next call of the same method.
    """

    def forward(
        self, rows: Sequence[Row], slots: SlotTable
    ) -> tuple[torch.Tensor, npt.NDArray[np.integer]]:
        """Compute the hidden states of the tokens of ``rows``, at least one, and fill the KV cache.

        ``slots`` has the rows' block tables. Returns the states [T, E] that the head takes, in
        which a row's tokens stand together, and for each row which of them is its last token's.
        """
        ...

    def logits(
        self, hidden: torch.Tensor, rows: npt.NDArray[np.integer] | None = None
    ) -> torch.Tensor:
        """The logits [R, V] float32 of the R ``rows`` of ``hidden``, or of all; may be changed.

        ``hidden`` is a contiguous part of what :meth:`forward` returned.
        """
        ...

    def most_probable(
        self, hidden: torch.Tensor, rows: npt.NDArray[np.integer]
    ) -> npt.NDArray[np.int32] | None:
        """[R]: the first of the largest logits of each row, -1 where they hold NaN or are all -inf.

        None where that is no cheaper than to take it from the logits.
        """
        ...


class TorchModel:
    """A decoder in torch's operations, in any dtype: the reference, and what runs everywhere."""

    def __init__(self, decoder: Decoder, attention: Attention) -> None:
        self._decoder = decoder
        self._attention = attention

    @torch.inference_mode()
    def forward(
        self, rows: Sequence[Row], slots: SlotTable
    ) -> tuple[torch.Tensor, npt.NDArray[np.integer]]:
        """See :meth:`CpuModel.forward`."""
        ordered = in_layout_order(rows)
        layout = step_layout(ordered, slots)
        tokens = np.concatenate([row.slot.tokens[row.start : row.end] for row in ordered])
        self._attention.begin(layout)
        hidden = self._decoder.forward(torch.from_numpy(tokens.astype(np.int64)), self._attention)
        ends = zip(ordered, layout.query_start[1:].tolist(), strict=True)
        last = {row.slot.number: end - 1 for row, end in ends}
        return hidden, np.array([last[row.slot.number] for row in rows])

    @torch.inference_mode()
    def logits(
        self, hidden: torch.Tensor, rows: npt.NDArray[np.integer] | None = None
    ) -> torch.Tensor:
        """See :meth:`CpuModel.logits`."""
        if rows is not None:
            hidden = hidden.index_select(0, torch.from_numpy(rows))
        return self._decoder.logits(hidden)

    def most_probable(
        self, hidden: torch.Tensor, rows: npt.NDArray[np.integer]
    ) -> npt.NDArray[np.int32] | None:
        """See :meth:`CpuModel.most_probable`."""
        return None
