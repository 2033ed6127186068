"""torch.cuda's streams, events and graphs over a :class:`Queue`, as far as ``gpu`` uses them."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kernels.fake_cuda.calls import DEVICE, DeviceCalls
from tests.kernels.fake_cuda.memory import Memory
from tests.kernels.fake_cuda.queue import CudaError, Graph, Mark, Queue, Stream

__all__ = ["install_runtime"]

TICKS_A_MILLISECOND = 1000


def install_runtime(
    monkeypatch: pytest.MonkeyPatch, queue: Queue, memory: Memory, calls: DeviceCalls
) -> None:
    """Put the fakes into ``torch.cuda``."""

    class FakeStream:
        def __init__(self, device: Any = None, *, stream: Stream | None = None) -> None:
            self.device = DEVICE
            self.queued = queue.new_stream() if stream is None else stream

        def __eq__(self, other: object) -> bool:
            return isinstance(other, FakeStream) and other.queued is self.queued

        def __hash__(self) -> int:
            return hash(self.queued.handle)

        def synchronize(self) -> None:
            queue.drain_stream(self.queued, "cudaStreamSynchronize")

    class FakeEvent:
        def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
            self._timed = enable_timing
            self._mark: Mark | None = None

        def record(self) -> None:
            self._mark = queue.mark(queue.current)

        def wait(self) -> None:
            queue.wait(queue.current, self.recorded("cudaStreamWaitEvent"))

        def synchronize(self) -> None:
            call = "cudaEventSynchronize"
            queue.synchronize(self.recorded(call), call)

        def query(self) -> bool:
            queue.refuse_in_capture("cudaEventQuery")
            return self.recorded("cudaEventQuery").done

        def elapsed_time(self, end: FakeEvent) -> float:
            first, last = (each.recorded("cudaEventElapsedTime") for each in (self, end))
            if not (self._timed and end._timed):
                raise CudaError("cudaEventElapsedTime of an event without timing")
            if not (first.done and last.done):
                raise CudaError("cudaEventElapsedTime of an event that hasn't passed")
            return (last.time - first.time) / TICKS_A_MILLISECOND

        def recorded(self, call: str) -> Mark:
            if self._mark is None:
                raise CudaError(f"{call} of an event that was never recorded")
            return self._mark

    class FakeGraph:
        def __init__(self) -> None:
            self._graph = Graph()

        def capture_begin(
            self, pool: Any = None, capture_error_mode: str = "global", **options: Any
        ) -> None:
            memory.sweep()
            queue.begin_capture(self._graph, capture_error_mode)

        def capture_end(self) -> None:
            memory.sweep()
            queue.end_capture()

        def replay(self) -> None:
            memory.sweep()
            queue.replay(self._graph)

    def set_stream(stream: FakeStream) -> None:
        queue.current = stream.queued

    def register(address: int, size: int, flags: int) -> int:
        memory.lock(address, size)
        return 0

    fakes = {
        "Stream": FakeStream,
        "Event": FakeEvent,
        "CUDAGraph": FakeGraph,
        "_get_device_index": lambda device, optional=False, allow_cpu=False: 0,
        "current_device": lambda: 0,
        "current_stream": lambda device=None: FakeStream(stream=queue.current),
        "default_stream": lambda device=None: FakeStream(stream=queue.default),
        "device": contextlib.nullcontext,
        "set_device": lambda device: None,
        "set_stream": set_stream,
        "synchronize": lambda device=None: queue.drain("cudaDeviceSynchronize"),
        "empty_cache": lambda: queue.refuse_in_capture("cudaFree"),
        "graph_pool_handle": lambda: (0, 1),
        "cudart": lambda: SimpleNamespace(cudaHostRegister=register),
        "get_device_properties": lambda index: SimpleNamespace(
            major=9, minor=0, multi_processor_count=4, shared_memory_per_multiprocessor=228 << 10
        ),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(
        torch.Tensor, "pin_memory", lambda tensor: calls.pinned_copy(tensor), raising=False
    )
    monkeypatch.setattr(
        torch.Tensor, "is_pinned", lambda tensor: memory.is_pinned(tensor), raising=False
    )
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda index: queue.current.handle, raising=False
    )
