"""The weights in a model's files: arrays of numbers, and matrices in ggml's quantized blocks."""

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
    """A quantized matrix of ``shape`` (outputs, inputs). Each row is a whole number of blocks."""

    type: TensorType
    shape: tuple[int, ...]
    raw: npt.NDArray[np.uint8]  # [rows, bytes per row], contiguous


Weight = Numbers | Blocks
