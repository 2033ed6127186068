"""The contents of a model's files: arrays of numbers, and matrices that stay blocks of quants."""

from __future__ import annotations

from typing import Any

import attrs
import ml_dtypes
import numpy as np
import numpy.typing as npt

from trioserve.model_files.gguf_header import TensorType

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16 = np.dtype(np.float16)
FLOAT32 = np.dtype(np.float32)

Numbers = npt.NDArray[Any]
"""An array of one of these three dtypes."""


@attrs.frozen(eq=False)
class Blocks:
    """A matrix of ``shape`` (outputs, inputs), of which each row is whole blocks."""

    type: TensorType
    shape: tuple[int, ...]
    raw: npt.NDArray[np.uint8]  # contiguous: the rows' blocks one after the other


Weight = Numbers | Blocks
