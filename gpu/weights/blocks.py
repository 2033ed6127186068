"""Weights that stay as a GGUF file has them: blocks of quants with their scales."""

from __future__ import annotations

import attrs
import torch

from trioserve.model_files.gguf_header import TensorType

__all__ = ["Blocks", "Weight"]


@attrs.frozen(eq=False)
class Blocks:
    """A matrix of ``shape`` (outputs, inputs), of which each row is whole blocks."""

    type: TensorType
    shape: tuple[int, ...]
    raw: torch.Tensor  # uint8, contiguous: the rows' blocks one after the other


Weight = torch.Tensor | Blocks
