"""Launches ``rms_norm.cu``: root mean square norm, with or without an addition before it."""

from __future__ import annotations

import numpy as np
import torch

from gpu.kernels import Kernel, KernelLoader, KernelSource, element_name, parameters

DTYPES = (torch.bfloat16, torch.float16)
VECTOR = 8
TILINGS = ((128, 1), (256, 1), (256, 2), (512, 2), (512, 4))
"""(threads, vectors of 8 elements per thread), the smallest row first."""
MAX_HIDDEN_SIZE = max(threads * vectors * VECTOR for threads, vectors in TILINGS)

PARAMETERS = parameters(
    ("x", "u8"),
    ("residual", "u8"),
    ("weight", "u8"),
    ("y", "u8"),
    ("num_vectors", "i4"),
    ("inverse_size", "f4"),
    ("eps", "f4"),
)


def rms_norm_source(hidden_size: int, dtype: torch.dtype, *, add: bool) -> KernelSource:
    """Return the kernel for rows of ``hidden_size``; with ``add``, x is added to the residual."""
    threads, vectors = next(
        (threads, vectors)
        for threads, vectors in TILINGS
        if threads * vectors * VECTOR >= hidden_size
    )
    return KernelSource(
        name="rms_norm",
        parameters=PARAMETERS,
        num_threads=threads,
        defines=(
            ("MAX_HIDDEN", threads * vectors * VECTOR),
            ("ELEMENT", element_name(dtype)),
            ("ADD", int(add)),
        ),
    )


VARIANTS = [
    rms_norm_source(threads * vectors * VECTOR, dtype, add=add)
    for threads, vectors in TILINGS
    for dtype in DTYPES
    for add in (False, True)
]


class RmsNorm:
    """y = x * weight / sqrt(mean(x^2) + eps) over rows of ``hidden_size`` numbers of ``dtype``.

    Raises:
        ValueError: a size or dtype that the kernel isn't made for.
    """

    def __init__(self, loader: KernelLoader, *, hidden_size: int, dtype: torch.dtype) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"no norm kernel for {dtype}")
        if hidden_size % VECTOR or not 0 < hidden_size <= MAX_HIDDEN_SIZE:
            raise ValueError(
                f"a hidden size of {hidden_size}: the norm kernel wants a multiple of {VECTOR} "
                f"up to {MAX_HIDDEN_SIZE}"
            )
        self._plain = loader.load(rms_norm_source(hidden_size, dtype, add=False))
        self._adding = loader.load(rms_norm_source(hidden_size, dtype, add=True))
        self._parameters = np.zeros(1, dtype=PARAMETERS)
        self._parameters["num_vectors"] = hidden_size // VECTOR
        self._parameters["inverse_size"] = 1 / hidden_size

    def launch(self, x: torch.Tensor, weight: torch.Tensor, eps: float, y: torch.Tensor) -> None:
        """Norm ``x`` [T, hidden_size] into ``y``, which is other memory; all are contiguous."""
        self._launch(self._plain, x, weight, eps, y)

    def launch_add(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        y: torch.Tensor,
    ) -> None:
        """Add ``x`` to ``residual`` in place and norm the sum into ``y``."""
        self._parameters["residual"] = residual.data_ptr()
        self._launch(self._adding, x, weight, eps, y)

    def _launch(
        self, kernel: Kernel, x: torch.Tensor, weight: torch.Tensor, eps: float, y: torch.Tensor
    ) -> None:
        filled = self._parameters
        filled["x"] = x.data_ptr()
        filled["weight"] = weight.data_ptr()
        filled["y"] = y.data_ptr()
        filled["eps"] = eps
        kernel.launch((x.shape[0], 1, 1), filled)
