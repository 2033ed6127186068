"""Launches ``silu_mul.cu``: the gate of a SwiGLU layer."""

from __future__ import annotations

import numpy as np
import torch

from gpu.kernels import KernelLoader, KernelSource, element_name, parameters

DTYPES = (torch.bfloat16, torch.float16)
NUM_THREADS = 128
VECTORS = 2
VECTOR = 8

PARAMETERS = parameters(("gate_up", "u8"), ("y", "u8"), ("num_vectors", "i4"))


def silu_mul_source(dtype: torch.dtype) -> KernelSource:
    """Return the kernel for one number format."""
    return KernelSource(
        name="silu_mul",
        parameters=PARAMETERS,
        num_threads=NUM_THREADS,
        defines=(("VECTORS", VECTORS), ("ELEMENT", element_name(dtype))),
    )


VARIANTS = [silu_mul_source(dtype) for dtype in DTYPES]


class SiluMul:
    """y = silu(gate) * up for rows of ``inner_size`` gates and ``inner_size`` up-projections.

    Raises:
        ValueError: a size or dtype that the kernel isn't made for.
    """

    def __init__(self, loader: KernelLoader, *, inner_size: int, dtype: torch.dtype) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"no silu_mul kernel for {dtype}")
        if inner_size % VECTOR or inner_size <= 0:
            raise ValueError(f"an inner size of {inner_size} is not a multiple of {VECTOR}")
        self._kernel = loader.load(silu_mul_source(dtype))
        self._blocks_of_token = -(-inner_size // (NUM_THREADS * VECTORS * VECTOR))
        self._parameters = np.zeros(1, dtype=PARAMETERS)
        self._parameters["num_vectors"] = inner_size // VECTOR

    def launch(self, gate_up: torch.Tensor, y: torch.Tensor) -> None:
        """From ``gate_up`` [T, 2 inner_size] to ``y`` [T, inner_size], both contiguous."""
        self._parameters["gate_up"] = gate_up.data_ptr()
        self._parameters["y"] = y.data_ptr()
        self._kernel.launch((gate_up.shape[0], self._blocks_of_token, 1), self._parameters)
