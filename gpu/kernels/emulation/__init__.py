"""Run the CUDA kernels on the CPU: compiled with g++, a fiber for every thread.

Threads switch at barriers and warp operations only, in an order that a seed decides, so a kernel
that depends on an order gives different results for different seeds. Shared memory starts out as
NaN; asynchronous copies land at a random moment until they are waited for. What no GPU allows (a
deadlock, a divergent warp operation, too much shared memory) is an :class:`EmulationError`. With a
sanitizer, reads and writes outside of arrays and races between threads are reported, too.

The emulation says nothing of speed, and of weak memory order only what ThreadSanitizer sees.

Imported by no other folder.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gpu.kernels import FOLDER, Kernel, KernelSource
from gpu.kernels.emulation.build import build_emulator, build_kernel

FORWARD, REVERSE, RANDOM = 0, 1, 2
PLAIN, FUSED, ROUGH = ARITHMETICS = ("plain", "fused", "rough")
_RUNTIMES = {"address": ("libasan", "__asan_init"), "thread": ("libtsan", "__tsan_init")}
_MESSAGE_BYTES = 1024


class EmulationError(RuntimeError):
    """A kernel did what no GPU allows: a deadlock, a divergent warp operation, a bad size."""


class EmulatedLoader:
    """:class:`gpu.kernels.KernelLoader` for the CPU.

    Args:
        order: FORWARD runs the ready thread of the lowest number, REVERSE that of the highest,
            RANDOM any.
        seed: goes with RANDOM, and decides when asynchronous copies land.
        workers: so many blocks run at once, each on a thread of its own.
        sanitizer: "", "address" (with undefined behavior) or "thread". The sanitizer's run-time
            library has to be in ``LD_PRELOAD``.
        arithmetic: PLAIN rounds every operation as IEEE 754 says. FUSED makes products and sums
            into fused multiply-adds wherever it can, as NVRTC does. ROUGH is off by up to 2 units
            in the last place and flushes subnormal numbers where an approximate operation does,
            and cuts the sums of tensor cores off.
        folder: where the sources are.

    The first three may be changed between launches.

    Raises:
        EmulationError: the sanitizer's run-time library is not there.
    """

    def __init__(
        self,
        *,
        order: int = RANDOM,
        seed: int = 0,
        workers: int = 1,
        sanitizer: str = "",
        arithmetic: str = PLAIN,
        folder: Path = FOLDER,
    ) -> None:
        assert arithmetic in ARITHMETICS
        self.order = order
        self.seed = seed
        self.workers = workers
        self.sanitizer = sanitizer
        self.arithmetic = arithmetic
        self.folder = folder
        self._kernels: dict[KernelSource, EmulatedKernel] = {}
        if sanitizer:
            library, symbol = _RUNTIMES[sanitizer]
            if not hasattr(ctypes.CDLL(None), symbol):
                raise EmulationError(f"start Python with {library}.so in LD_PRELOAD")

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @property
    def num_multiprocessors(self) -> int:
        """A small number, so that small inputs are split as large ones are on a GPU."""
        return 4

    def load(self, source: KernelSource) -> Kernel:
        """See :meth:`gpu.kernels.KernelLoader.load`.

        Raises:
            BuildError: there is no g++, or it doesn't compile.
        """
        if source not in self._kernels:
            self._kernels[source] = EmulatedKernel(self, source)
        return self._kernels[source]


class EmulatedKernel:
    """One kernel in a shared library of its own."""

    def __init__(self, loader: EmulatedLoader, source: KernelSource) -> None:
        self._loader = loader
        self._source = source
        self._emulator = ctypes.CDLL(str(build_emulator(loader.sanitizer)))
        library = build_kernel(
            source,
            folder=loader.folder,
            sanitizer=loader.sanitizer,
            fused=loader.arithmetic == FUSED,
        )
        self._kernel = ctypes.CDLL(str(library)).emu_kernel
        self.bank_conflicts = 0
        """Number of extra passes over shared memory that the ldmatrix of the last launch took."""

    def launch(self, grid: tuple[int, int, int], parameters: npt.NDArray[Any]) -> None:
        """See :meth:`gpu.kernels.Kernel.launch`.

        Raises:
            EmulationError: the kernel broke a rule of the machine.
        """
        assert parameters.dtype == self._source.parameters
        if 0 in grid:
            return
        parameters = np.ascontiguousarray(parameters)
        conflicts = ctypes.c_uint64()
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        failed = self._emulator.emu_launch(
            ctypes.cast(self._kernel, ctypes.c_void_p),
            ctypes.c_void_p(parameters.ctypes.data),
            (ctypes.c_uint * 3)(*grid),
            (ctypes.c_uint * 3)(self._source.num_threads, 1, 1),
            ctypes.c_size_t(self._source.shared_bytes),
            ctypes.c_int(self._loader.order),
            ctypes.c_uint64(self._loader.seed),
            ctypes.c_int(self._loader.arithmetic == ROUGH),
            ctypes.c_int(self._loader.workers),
            ctypes.byref(conflicts),
            message,
            ctypes.c_size_t(_MESSAGE_BYTES),
        )
        if failed:
            raise EmulationError(f"{self._source.title}: {message.value.decode()}")
        self.bank_conflicts = conflicts.value
