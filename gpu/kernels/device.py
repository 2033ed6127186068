"""Kernels on a GPU: built for it, loaded by CuPy's driver functions, launched on torch's stream.

CuPy's RawKernel would find the stream, the context and the arguments anew at every launch; here a
launch is one call of the driver with what was prepared when the kernel was loaded.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy.typing as npt
import torch

from gpu.kernels import Kernel, KernelSource, nvrtc
from gpu.kernels.cubins import CubinCache, build_all, default_jobs
from gpu.kernels.nvrtc import Build, KernelBuildError
from gpu.kernels.targets import target_for

PERCENT_SHARED = 100
"""The preferred share of a multiprocessor's fast memory for shared memory instead of cache."""


class KernelLaunchError(RuntimeError):
    """The driver refused a launch; or an earlier kernel failed, which only shows now."""


class DeviceLoader:
    """:class:`gpu.kernels.KernelLoader` for one GPU.

    Loads and launches happen in one thread, with ``device`` as torch's current device there. Load
    before a CUDA graph is captured: loading waits for the device.
    """

    def __init__(
        self, device: torch.device | None = None, *, cache: CubinCache | None = None
    ) -> None:
        """Look at ``device``, by default torch's current one; nothing is built yet.

        Raises:
            KernelBuildError: CuPy or NVRTC is missing, or knows no such GPU.
        """
        index = None if device is None else device.index
        if index is None:
            index = torch.cuda.current_device()
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        self.target = target_for(capability, nvrtc.capabilities())
        self._device = torch.device("cuda", index)
        self._num_multiprocessors = int(properties.multi_processor_count)
        # CUDA keeps a KiB of each block's shared memory for itself.
        self._shared_per_block = int(properties.shared_memory_per_multiprocessor) - 1024
        self._cache = CubinCache() if cache is None else cache
        self._driver = _driver()
        self._kernels: dict[KernelSource, DeviceKernel] = {}

    @property
    def device(self) -> torch.device:
        """The GPU."""
        return self._device

    @property
    def num_multiprocessors(self) -> int:
        """Compute target of the GPU."""
        return self._num_multiprocessors

    def load(self, source: KernelSource) -> Kernel:
        """See :meth:`gpu.kernels.KernelLoader.load`.

        Raises:
            KernelBuildError: it doesn't compile, or needs more than this GPU has.
        """
        if source not in self._kernels:
            self.prepare([source])
        return self._kernels[source]

    def prepare(
        self,
        sources: Iterable[KernelSource],
        progress: Callable[[int, int], None] | None = None,
        jobs: int | None = None,
    ) -> None:
        """Build what isn't built yet, ``jobs`` at once, and load it: quicker than one by one.

        ``progress`` is called with how many are built and how many there are.

        Raises:
            KernelBuildError: one doesn't compile, or needs more than this GPU has.
        """
        missing = [each for each in dict.fromkeys(sources) if each not in self._kernels]
        wanted = [(source, self.target) for source in missing]
        outcomes = build_all(self._cache, wanted, jobs or default_jobs(), progress)
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()  # makes torch's context current, for the driver to load into
            for each in outcomes:
                if isinstance(each.result, KernelBuildError):
                    raise each.result
                check_shared(each.source, each.result, self._shared_per_block)
                self._kernels[each.source] = DeviceKernel(
                    each.source, each.result.cubin, self._driver, self._current_stream()
                )

    def _current_stream(self) -> Callable[[], int]:
        index = self._device.index
        # What torch.cuda.current_stream(index).cuda_stream reads, without making an object.
        raw_stream = torch._C._cuda_getCurrentRawStream
        return lambda: raw_stream(index)


def _driver() -> Any:
    return importlib.import_module("cupy_backends.cuda.api.driver")


def check_shared(source: KernelSource, build: Build, limit: int) -> None:
    """Compare the shared memory of a block with a GPU's ``limit``, both in bytes.

    Raises:
        KernelBuildError: it is more.
    """
    needed = source.shared_bytes + build.usage.static_shared
    if needed > limit:
        raise KernelBuildError(
            f"{source.title} needs {needed} bytes of shared memory a block, this GPU has {limit}"
        )


class DeviceKernel:
    """One loaded kernel. ``driver`` has the functions of CuPy's ``cuda.api.driver``."""

    def __init__(
        self, source: KernelSource, cubin: bytes, driver: Any, current_stream: Callable[[], int]
    ) -> None:
        self._source = source
        self._launch = driver.launchKernel
        self._current_stream = current_stream
        try:
            self._module = driver.moduleLoadData(cubin)
            self._function = driver.moduleGetFunction(self._module, source.name)
            # Asking for an attribute also loads the code itself, which CUDA would leave for later.
            most = driver.funcGetAttribute(
                driver.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, self._function
            )
            if source.shared_bytes:
                # Above 48 KiB has to be asked for. Such a kernel is laid out for several blocks on
                # a multiprocessor, and has no use for the rest of the memory as a cache.
                for attribute, value in (
                    (driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, source.shared_bytes),
                    (driver.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, PERCENT_SHARED),
                ):
                    driver.funcSetAttribute(self._function, attribute, value)
        except RuntimeError as error:
            raise KernelBuildError(f"{source.title} can't be loaded: {error}") from error
        if most < source.num_threads:
            raise KernelBuildError(
                f"{source.title} needs blocks of {source.num_threads} threads, its registers "
                f"allow {most}"
            )
        self._parameters: npt.NDArray[Any] | None = None
        self._pointers = (ctypes.c_void_p * 1)()
        self._arguments = ctypes.addressof(self._pointers)

    def launch(self, grid: tuple[int, int, int], parameters: npt.NDArray[Any]) -> None:
        """See :meth:`gpu.kernels.Kernel.launch`. Quickest with the same array every time.

        Raises:
            KernelLaunchError: the driver refuses.
        """
        if parameters is not self._parameters:
            self._bind(parameters)
        x, y, z = grid
        if not (x and y and z):
            return
        source = self._source
        try:
            self._launch(
                self._function,
                x,
                y,
                z,
                source.num_threads,
                1,
                1,
                source.shared_bytes,
                self._current_stream(),
                self._arguments,
                0,
            )
        except RuntimeError as error:
            raise KernelLaunchError(f"{source.title} over {grid} blocks: {error}") from error

    def _bind(self, parameters: npt.NDArray[Any]) -> None:
        assert parameters.dtype == self._source.parameters
        assert parameters.size == 1
        # Holding the array keeps its address, and keeps any other from being taken for it.
        self._parameters = parameters
        self._pointers[0] = parameters.ctypes.data
