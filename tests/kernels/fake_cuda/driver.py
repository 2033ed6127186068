"""CuPy's driver functions over a :class:`Queue`: what is launched runs in the emulation, later."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

from gpu.kernels import Kernel, KernelSource
from gpu.kernels.cubins import Outcome
from gpu.kernels.emulation import EmulatedLoader
from gpu.kernels.nvrtc import Build, KernelUsage
from tests.kernels.fake_cuda.queue import CudaError, Queue

__all__ = ["FakeDriver"]


class FakeDriver:
    """The functions of ``cupy_backends.cuda.api.driver``, and a compiler for them.

    A cubin is the number of a source.
    """

    CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 0
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
    CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT = 9

    def __init__(self, queue: Queue, emulation: EmulatedLoader) -> None:
        self._queue = queue
        self._emulation = emulation
        self._sources: list[KernelSource] = []
        self._kernels: dict[int, Kernel] = {}

    def build_all(
        self,
        cache: object,
        wanted: Iterable[tuple[KernelSource, str]],
        jobs: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Outcome]:
        """Build as :func:`gpu.kernels.cubins.build_all` does."""
        outcomes = []
        for source, target in wanted:
            cubin = str(len(self._sources)).encode()
            self._sources.append(source)
            usage = KernelUsage(registers=32, stack=0, spills=0, static_shared=0)
            build = Build(cubin=cubin, usage=usage)
            outcomes.append(Outcome(source=source, target=target, result=build))
        return outcomes

    def moduleLoadData(self, cubin: bytes) -> int:
        self._queue.refuse_in_capture("cuModuleLoadData")
        return int(cubin)

    def moduleGetFunction(self, module: int, name: str) -> int:
        assert self._sources[module].name == name
        self._kernels[module] = self._emulation.load(self._sources[module])
        return module

    def funcGetAttribute(self, attribute: int, function: int) -> int:
        return 1024

    def funcSetAttribute(self, function: int, attribute: int, value: int) -> None:
        self._queue.refuse_in_capture("cuFuncSetAttribute")

    def launchKernel(
        self,
        function: int,
        x: int,
        y: int,
        z: int,
        threads: int,
        threads_y: int,
        threads_z: int,
        shared_bytes: int,
        stream: int,
        arguments: int,
        extra: int,
    ) -> None:
        source = self._sources[function]
        if (threads, threads_y, threads_z, shared_bytes) != (
            source.num_threads,
            1,
            1,
            source.shared_bytes,
        ):
            raise CudaError(f"cuLaunchKernel of {source.name} with other blocks than it has")
        # The driver reads the parameters before it returns.
        (address,) = (ctypes.c_void_p * 1).from_address(arguments)
        text = ctypes.string_at(address or 0, source.parameters.itemsize)
        parameters = np.frombuffer(text, source.parameters)
        launch = partial(self._kernels[function].launch, (x, y, z), parameters)
        self._queue.queue(self._queue.stream_of(stream), "cuLaunchKernel", launch)
