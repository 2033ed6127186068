"""Launches ``combine_partials.cu``: merges the partial attention results of each row."""

from __future__ import annotations

import numpy as np
import torch

from gpu.kernels import KernelLoader, KernelSource, element_name, parameters
from gpu.kernels.attention_tile import DTYPES, HEAD_DIMS

_NUM_THREADS = 128

_PARAMETERS = parameters(
    ("partial_out", "u8"),
    ("partial_lse", "u8"),
    ("partial_start", "u8"),
    ("out", "u8"),
    ("num_heads", "i4"),
    ("unused", "i4"),
)


def source(head_dim: int, dtype: torch.dtype) -> KernelSource:
    """Return the kernel for one head size and dtype of the output."""
    return KernelSource(
        name="combine_partials",
        parameters=_PARAMETERS,
        num_threads=_NUM_THREADS,
        defines=(("HEAD_DIM", head_dim), ("TYPE", element_name(dtype))),
    )


VARIANTS = [source(head_dim, dtype) for head_dim in HEAD_DIMS for dtype in DTYPES]


class CombinePartials:
    """Merges partial results into the rows that have any; the other rows are left alone.

    Raises:
        ValueError: the kernel doesn't exist for these choices.
    """

    def __init__(
        self, loader: KernelLoader, *, num_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        if head_dim not in HEAD_DIMS or dtype not in DTYPES:
            raise ValueError(f"no combine_partials for head_dim {head_dim} and {dtype}")
        self.kernel = loader.load(source(head_dim, dtype))
        self._num_heads = num_heads
        self._head_dim = head_dim
        self._grid = (0, 0, 0)
        self._parameters = np.zeros(1, _PARAMETERS)
        self._parameters["num_heads"] = num_heads

    def prepare(
        self,
        *,
        partial_out: torch.Tensor,
        partial_lse: torch.Tensor,
        partial_start: torch.Tensor,
        num_rows: int,
    ) -> None:
        """Set the buffers of the launches that follow. All are read when the kernel runs.

        ``partial_out`` float32 [max_partials, num_heads, head_dim]; ``partial_lse`` float32
        [max_partials, num_heads]; ``partial_start`` int32 [num_rows + 1 or more]. ``num_rows``
        counts padded rows too, which have no partials.

        Raises:
            ValueError: a buffer of another dtype, shape or alignment.
        """
        check_partials(partial_out, partial_lse, self._num_heads, self._head_dim)
        if partial_start.dtype != torch.int32 or partial_start.numel() < num_rows + 1:
            raise ValueError(f"partial_start must be int32 and hold {num_rows + 1} numbers")
        self._parameters["partial_out"] = partial_out.data_ptr()
        self._parameters["partial_lse"] = partial_lse.data_ptr()
        self._parameters["partial_start"] = partial_start.data_ptr()
        num_vectors = self._num_heads * self._head_dim // 4
        self._grid = (-(-num_vectors // _NUM_THREADS), num_rows, 1)
        # The kernel has only addresses: what they belong to must live until the next step.
        self._kept = (partial_out, partial_lse, partial_start)

    def launch(self, out: torch.Tensor) -> None:
        """Merge into ``out`` [rows, num_heads, head_dim], on torch's current stream."""
        self._parameters["out"] = out.data_ptr()
        self.kernel.launch(self._grid, self._parameters)


def check_partials(
    partial_out: torch.Tensor, partial_lse: torch.Tensor, num_heads: int, head_dim: int
) -> None:
    """Check the buffers of partial results.

    Raises:
        ValueError: one is of another dtype, shape or alignment than the kernels want.
    """
    num_partials = partial_out.shape[0]
    for name, tensor, shape in (
        ("partial_out", partial_out, (num_partials, num_heads, head_dim)),
        ("partial_lse", partial_lse, (num_partials, num_heads)),
    ):
        if (
            tensor.dtype != torch.float32
            or tensor.shape != shape
            or not tensor.is_contiguous()
            or tensor.data_ptr() % 16
        ):
            raise ValueError(f"{name} must be a contiguous float32 tensor of {shape}")
