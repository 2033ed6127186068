"""The seam between the executor of the CPU and what computes a model there."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from gpu.attention import Attention, StepLayout
from gpu.models.decoder import Decoder

__all__ = ["CpuModel", "TorchModel"]


class CpuModel(Protocol):
    """A model with its paged KV cache. T tokens of a step stand row after row, as in its layout.

    What a method returns is valid until the next call of the same method.
    """

    def forward(self, tokens: npt.NDArray[np.int32], layout: StepLayout) -> torch.Tensor:
        """The hidden states [T, E] of ``tokens`` [T], which the head takes; fills the KV cache."""
        ...

    def logits(
        self, hidden: torch.Tensor, rows: npt.NDArray[np.int64] | None = None
    ) -> torch.Tensor:
        """The logits [R, V] float32 of the R ``rows`` of ``hidden``, or of all; may be changed.

        ``hidden`` is a contiguous part of what :meth:`forward` returned.
        """
        ...

    def most_probable(
        self, hidden: torch.Tensor, rows: npt.NDArray[np.int64]
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

    def forward(self, tokens: npt.NDArray[np.int32], layout: StepLayout) -> torch.Tensor:
        """See :meth:`CpuModel.forward`."""
        self._attention.begin(layout)
        return self._decoder.forward(torch.from_numpy(tokens.astype(np.int64)), self._attention)

    def logits(
        self, hidden: torch.Tensor, rows: npt.NDArray[np.int64] | None = None
    ) -> torch.Tensor:
        """See :meth:`CpuModel.logits`."""
        chosen = hidden if rows is None else hidden.index_select(0, torch.from_numpy(rows))
        return self._decoder.logits(chosen)

    def most_probable(
        self, hidden: torch.Tensor, rows: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int32] | None:
        """See :meth:`CpuModel.most_probable`."""
        return None
