"""The whole fake GPU: what a test asks for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import pytest
import torch

from gpu.kernels.cubins import CubinCache
from gpu.kernels.device import DeviceLoader
from gpu.kernels.emulation import EmulatedLoader
from tests.kernels.fake_cuda.calls import DEVICE, DeviceCalls
from tests.kernels.fake_cuda.driver import FakeDriver
from tests.kernels.fake_cuda.memory import Memory
from tests.kernels.fake_cuda.operations import QueuedOperations
from tests.kernels.fake_cuda.queue import Queue
from tests.kernels.fake_cuda.runtime import install_runtime

__all__ = ["FakeGpu", "fake_gpu"]


@attrs.frozen
class FakeGpu:
    """A GPU with a ``queue`` that orders its work, and the real loader of kernels for it."""

    queue: Queue
    memory: Memory
    loader: DeviceLoader


@contextmanager
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """Have a GPU, and this thread work in a stream of its own, as a worker does."""
    queue = Queue()
    memory = Memory(queue)
    operations = QueuedOperations(queue, memory)
    calls = DeviceCalls(queue, memory, operations)
    driver = FakeDriver(queue, EmulatedLoader())
    install_runtime(monkeypatch, queue, memory, calls)
    monkeypatch.setattr("gpu.kernels.device._driver", lambda: driver)
    monkeypatch.setattr("gpu.kernels.device.build_all", driver.build_all)
    read = os.eventfd_read

    def eventfd_read(descriptor: int) -> int:
        with queue.host_waits():
            return read(descriptor)

    monkeypatch.setattr(os, "eventfd_read", eventfd_read)
    with operations, calls:
        torch.cuda.set_stream(torch.cuda.Stream(DEVICE))  # type: ignore[no-untyped-call]
        yield FakeGpu(queue, memory, DeviceLoader(DEVICE, cache=CubinCache()))
