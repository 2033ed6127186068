"""The storage formats of the compiled kernels' weights, and the models that they compute."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np

from gpu.weights.blocks import BFLOAT16
from trioserve.model_files import ModelConfig


class Format(enum.IntEnum):
    """The storage format of a packed weight; the values are those of ``Kind`` in product.h."""

    BF16 = 0
    Q8_0 = 1
    Q4_0 = 2
    Q4_1 = 3
    W8A8 = 4


_KEPT = {
    "auto": ("Q8_0", "Q4_0", "Q4_1"),
    "int8": ("Q8_0",),
    "int4": ("Q4_0", "Q4_1"),
    "w8a8": ("Q8_0",),
}
"""By quantization, the types of a GGUF file's matrices that are packed as they are."""
ROUNDED = {"int8": Format.Q8_0, "int4": Format.Q4_0, "w8a8": Format.W8A8}
"""Formats that other matrices are rounded to; without one they are bfloat16."""


def obstacle_in(config: ModelConfig) -> str | None:
    """Why the compiled kernels can't compute a model of this shape; None if they can."""
    if config.head_dim % 32 or config.head_dim > 256:
        return f"heads of {config.head_dim} numbers"
    for size in (config.hidden_size, *config.mlp_sizes):
        if size % 32:
            return f"{size} numbers, which are no whole blocks of 32"
    return None


def read_as(quantization: str) -> tuple[np.dtype[Any] | None, tuple[str, ...]]:
    """Return what :func:`gpu.weights.read_weights` is to give: ``dtype`` and ``keep``."""
    dtype = None if quantization in ROUNDED else BFLOAT16
    return dtype, _KEPT.get(quantization, ())
