"""One GPU as the loading of a model sees it: its memory, its kernels, its streams."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from gpu.cuda.graphs import Capturer, CudaCapturer
from gpu.cuda.timeline import CudaTimeline, Timeline
from gpu.kernels import KernelLoader, KernelSource
from gpu.kernels.device import DeviceLoader, KernelLaunchError


class Gpu(Protocol):
    """The services of a GPU that loading uses."""

    @property
    def name(self) -> str:
        """Name of the GPU."""

    @property
    def loader(self) -> KernelLoader:
        """Loads kernels for it."""

    def build(self, sources: Iterable[KernelSource], progress: Callable[[int, int], None]) -> None:
        """Build kernels side by side. ``progress`` is called with how many are built of how many.

        Raises:
            KernelBuildError: one can't be built.
        """

    def memory(self) -> tuple[int, int]:
        """Bytes free and in all, with nothing kept that isn't used."""

    def peak_of(self, work: Callable[[], None]) -> int:
        """Bytes that ``work`` allocates at a time, at most, besides what is there already."""

    def timeline(self) -> Timeline:
        """Return the one timeline of its steps."""

    def capturer(self) -> Capturer:
        """Captures graphs of the stream that everything runs in."""


class CudaDevice:
    """A real GPU. From its creation on, this thread works in a stream of its own on it.

    Raises:
        KernelBuildError: what builds kernels is missing.
    """

    def __init__(self, device: torch.device) -> None:
        torch.cuda.set_device(device)
        # The default stream can't be captured, and would wait for the others.
        torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        self._device = device
        self._loader = DeviceLoader(device)
        self._timeline = CudaTimeline(device)

    @property
    def name(self) -> str:
        """See :attr:`Gpu.name`."""
        return str(torch.cuda.get_device_name(self._device))

    @property
    def loader(self) -> KernelLoader:
        """See :attr:`Gpu.loader`."""
        return self._loader

    def build(self, sources: Iterable[KernelSource], progress: Callable[[int, int], None]) -> None:
        """See :meth:`Gpu.build`."""
        self._loader.prepare(sources, progress)

    def memory(self) -> tuple[int, int]:
        """See :meth:`Gpu.memory`."""
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)

    def peak_of(self, work: Callable[[], None]) -> int:
        """See :meth:`Gpu.peak_of`."""
        torch.cuda.synchronize(self._device)
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        work()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - before

    def timeline(self) -> Timeline:
        """See :meth:`Gpu.timeline`."""
        return self._timeline

    def capturer(self) -> Capturer:
        """See :meth:`Gpu.capturer`."""
        return CudaCapturer()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` means that the GPU's memory is full, whichever library says so."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error).lower().replace("_", " ")
    return isinstance(error, RuntimeError) and ("out of memory" in text or "alloc failed" in text)


def is_poisoned_by(error: BaseException) -> bool:
    """Return whether, after this error of the device, every later call in this process fails
    likewise.

    Memory that isn't there is no such error: a step with fewer requests may find enough.
    """
    from_device = isinstance(error, (torch.AcceleratorError, KernelLaunchError))
    return from_device and not is_out_of_memory(error)
