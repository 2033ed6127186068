"""The compiled small operations by themselves, on tensors: for tests and measurements.

A model runs them from within its own step, without coming back to Python between them.
"""

from __future__ import annotations

import ctypes

import torch

from gpu.cpu.library import load_library

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class CompiledOperations:
    """:class:`gpu.models.operations.Operations` for bfloat16 on the CPU, and what belongs to it.

    Raises:
        LibraryBuildError: there is no library for this machine.
    """

    def __init__(self, threads: int = 1) -> None:
        self._library = library = load_library()
        library.elementwise_pool.restype = _POINTER
        library.elementwise_pool.argtypes = [ctypes.c_int32]
        library.elementwise_free.argtypes = [_POINTER]
        library.elementwise_rms_norm.argtypes = [
            *(_POINTER, _POINTER, _POINTER, _FLOAT),
            *(_INT, _INT, _POINTER),
        ]
        library.elementwise_add_rms_norm.argtypes = [
            *(_POINTER, _POINTER, _POINTER, _POINTER, _FLOAT),
            *(_INT, _INT, _POINTER),
        ]
        library.elementwise_silu_mul.argtypes = [_POINTER, _POINTER, _INT, _INT, _POINTER]
        library.elementwise_gather_rows.argtypes = [
            *(_POINTER, _POINTER, _POINTER),
            *(_INT, _INT, _POINTER),
        ]
        library.elementwise_argmax_rows.argtypes = [_POINTER, _POINTER, _INT, _INT, _POINTER]
        self._pool = library.elementwise_pool(threads)
        if not self._pool:
            raise MemoryError("no memory for the threads")

    def close(self) -> None:
        """End the threads."""
        if self._pool:
            self._library.elementwise_free(self._pool)
            self._pool = None

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See :meth:`gpu.models.operations.Operations.rms_norm`."""
        y = torch.empty_like(x)
        self._library.elementwise_rms_norm(
            *(self._pool, x.data_ptr(), weight.data_ptr(), eps, *x.shape, y.data_ptr())
        )
        return y

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See :meth:`gpu.models.operations.Operations.add_rms_norm`."""
        y = torch.empty_like(x)
        self._library.elementwise_add_rms_norm(
            *(self._pool, x.data_ptr(), residual.data_ptr(), weight.data_ptr(), eps),
            *(*x.shape, y.data_ptr()),
        )
        return y

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See :meth:`gpu.models.operations.Operations.silu_mul`."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        y = gate_up.new_empty(rows, width)
        self._library.elementwise_silu_mul(
            *(self._pool, gate_up.data_ptr(), rows, width, y.data_ptr())
        )
        return y

    def gather_rows(self, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """``table[ids]`` for ``ids`` [R] int32."""
        y = table.new_empty(len(ids), table.shape[1])
        self._library.elementwise_gather_rows(
            *(self._pool, table.data_ptr(), ids.data_ptr(), *y.shape, y.data_ptr())
        )
        return y

    def argmax_rows(self, x: torch.Tensor) -> torch.Tensor:
        """[R] int32: the first largest number of each row of ``x`` [R, V] float32.

        A NaN counts as the largest.
        """
        best = torch.empty(len(x), dtype=torch.int32)
        self._library.elementwise_argmax_rows(
            *(self._pool, x.data_ptr(), *x.shape, best.data_ptr())
        )
        return best
