"""Run the CUDA kernels on the CPU: compiled with g++, a fiber for every thread.

Threads switch at barriers and warp operations only, in an order that a seed decides, so a kernel
that depends on an order gives different results for different seeds. Shared memory starts out as
NaN; asynchronous copies land at a random moment until they are waited for.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gpu.emulation.build import build
from gpu.kernels import Kernel, KernelSource

__all__ = ["FORWARD", "RANDOM", "REVERSE", "EmulatedKernel", "EmulatedLoader", "EmulationError"]

FORWARD, REVERSE, RANDOM = 0, 1, 2


class EmulationError(RuntimeError):
    """A kernel did what no GPU allows: a deadlock, a divergent warp operation, a bad size."""


class EmulatedLoader:
    """:class:`gpu.kernels.KernelLoader` for the CPU.

    ``order`` is FORWARD, REVERSE or RANDOM; ``seed`` goes with the last and with the moments at
    which copies land. ``workers`` blocks run at once, each on a thread of its own. ``sanitizer`` is
    "", "address" or "thread". All may be changed between launches but the last.
    """

    def __init__(
        self, *, order: int = RANDOM, seed: int = 0, workers: int = 1, sanitizer: str = ""
    ) -> None:
        self.order = order
        self.seed = seed
        self.workers = workers
        self.sanitizer = sanitizer
        self._kernels: dict[KernelSource, EmulatedKernel] = {}

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @property
    def num_multiprocessors(self) -> int:
        """A small number, so that small inputs are split as large ones are on a GPU."""
        return 4

    def load(self, source: KernelSource) -> Kernel:
        """See :meth:`gpu.kernels.KernelLoader.load`."""
        if source not in self._kernels:
            self._kernels[source] = EmulatedKernel(self, source)
        return self._kernels[source]


class EmulatedKernel:
    """One kernel in a shared library of its own."""

    def __init__(self, loader: EmulatedLoader, source: KernelSource) -> None:
        self._loader = loader
        self._source = source
        self._library = ctypes.CDLL(str(build(source, loader.sanitizer)))
        self._library.emu_error.restype = ctypes.c_char_p
        self._library.emu_conflicts.restype = ctypes.c_uint64

    @property
    def bank_conflicts(self) -> int:
        """How many extra passes over shared memory the ldmatrix of the last launch took."""
        return int(self._library.emu_conflicts())

    def launch(self, grid: tuple[int, int, int], parameters: npt.NDArray[Any]) -> None:
        """See :meth:`gpu.kernels.Kernel.launch`.

        Raises:
            EmulationError: the kernel broke a rule of the machine.
        """
        assert parameters.dtype == self._source.parameters
        if 0 in grid:
            return
        parameters = np.ascontiguousarray(parameters)
        failed = self._library.emu_launch(
            ctypes.cast(self._library.emu_kernel, ctypes.c_void_p),
            (ctypes.c_uint * 3)(*grid),
            (ctypes.c_uint * 3)(self._source.num_threads, 1, 1),
            ctypes.c_size_t(self._source.shared_bytes),
            (ctypes.c_void_p * 1)(parameters.ctypes.data),
            self._loader.order,
            ctypes.c_uint64(self._loader.seed),
            self._loader.workers,
        )
        if failed:
            raise EmulationError(f"{self._source.title}: {self._library.emu_error().decode()}")
