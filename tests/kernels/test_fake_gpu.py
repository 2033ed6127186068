"""The fake GPU refuses what CUDA refuses, and is as late as CUDA may be."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gpu._util.upload import staged, upload
from gpu.cuda.graphs import CudaCapturer
from gpu.kernels.gather_tokens import GatherTokens
from tests.kernels.fake_cuda.gpu import FakeGpu
from tests.kernels.fake_cuda.queue import CudaError

DEVICE = torch.device("cuda", 0)


def new_event(**options: bool) -> Any:
    return torch.cuda.Event(**options)  # type: ignore[no-untyped-call]


def recorded(**options: bool) -> Any:
    event = new_event(**options)
    event.record()
    return event


def new_stream() -> Any:
    return torch.cuda.Stream(DEVICE)  # type: ignore[no-untyped-call]


class Illegal:
    """Calls that CUDA refuses during a capture, and what they work with."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.host = torch.zeros(4)
        self.device = torch.zeros(4, device=DEVICE)
        self.event = recorded()
        self.graph, _ = CudaCapturer().capture(lambda: self.device.add_(1))

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def wait_on_the_host(self) -> None:
        self.event.synchronize()

    def query(self) -> None:
        self.event.query()

    def wait_for_what_is_not_captured(self) -> None:
        self.event.wait()

    def copy_here(self) -> None:
        self.device.copy_(self.host, non_blocking=True)

    def copy_there(self) -> None:
        self.host.copy_(self.device, non_blocking=True)

    def move(self) -> None:
        self.host.to(DEVICE, non_blocking=True)

    def wait_for_a_copy(self) -> None:
        self.device.copy_(staged(np.zeros(4, np.float32), DEVICE))

    def look(self) -> None:
        self.device.sum().item()

    def decide(self) -> None:
        assert self.device.any()

    def launch_in_the_default_stream(self) -> None:
        with torch.cuda.stream(torch.cuda.default_stream()):
            self.device.add_(1)

    def allocate_elsewhere(self) -> None:
        with torch.cuda.stream(new_stream()):
            torch.empty(4, device=DEVICE)

    def free_what_is_kept(self) -> None:
        torch.cuda.empty_cache()

    def lock(self) -> None:
        torch.cuda.cudart().cudaHostRegister(self.host.data_ptr(), 16, 0)  # type: ignore[no-untyped-call]

    def load(self) -> None:
        history = torch.zeros(2, 8, dtype=torch.int32, device=DEVICE)
        GatherTokens(self.gpu.loader, history=history)

    def replay(self) -> None:
        self.graph.replay()

    def capture(self) -> None:
        CudaCapturer().capture(lambda: None)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (Illegal.synchronize, "cudaDeviceSynchronize"),
        (Illegal.wait_on_the_host, "cudaEventSynchronize"),
        (Illegal.query, "cudaEventQuery"),
        (Illegal.wait_for_what_is_not_captured, "cudaStreamWaitEvent for what isn't captured"),
        (Illegal.copy_here, "cudaMemcpyAsync of memory that isn't page-locked"),
        (Illegal.copy_there, "cudaMemcpyAsync of memory that isn't page-locked"),
        (Illegal.move, "cudaMemcpyAsync of memory that isn't page-locked"),
        (Illegal.wait_for_a_copy, "cudaMemcpyAsync"),
        (Illegal.look, "cudaStreamSynchronize (_local_scalar_dense)"),
        (Illegal.decide, "cudaStreamSynchronize (_local_scalar_dense)"),
        (Illegal.launch_in_the_default_stream, "add_ in the legacy default stream"),
        (Illegal.allocate_elsewhere, "cudaMalloc outside of the graph's pool"),
        (Illegal.free_what_is_kept, "cudaFree"),
        (Illegal.lock, "cudaHostRegister"),
        (Illegal.load, "cudaDeviceSynchronize"),
        (Illegal.replay, "cudaGraphLaunch"),
        (Illegal.capture, "cudaDeviceSynchronize"),
    ],
)
def test_a_capture_is_spoiled_by(gpu: FakeGpu, call: Callable[[Illegal], None], named: str) -> None:
    illegal = Illegal(gpu)
    turn = iter(range(2))

    def work() -> None:
        if next(turn):  # what runs before the capture is no part of it
            call(illegal)

    with pytest.raises(CudaError) as caught:
        CudaCapturer().capture(work)
    assert str(caught.value) == f"cudaStreamEndCapture: the capture was spoiled by {named}"
    CudaCapturer().capture(lambda: illegal.device.add_(1))


def test_the_default_stream_is_not_captured(gpu: FakeGpu) -> None:
    torch.cuda.set_stream(torch.cuda.default_stream())
    with pytest.raises(CudaError, match=r"^cudaStreamBeginCapture of the legacy default stream"):
        CudaCapturer().capture(lambda: None)


def synchronize_in_a_thread(gpu: FakeGpu, event: Any) -> None:
    def synchronize() -> None:
        with contextlib.suppress(CudaError):  # as gpu._util.completions.Completions does
            event.synchronize()

    thread = threading.Thread(target=synchronize)
    thread.start()
    with gpu.queue.host_waits():
        thread.join()


def test_another_thread_may_wait_during_a_capture(gpu: FakeGpu) -> None:
    event = recorded()
    CudaCapturer().capture(lambda: synchronize_in_a_thread(gpu, event))


def test_another_thread_spoils_a_capture_in_global_mode(gpu: FakeGpu) -> None:
    event = recorded()
    event.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(CudaError, match="spoiled by cudaEventSynchronize"):
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            synchronize_in_a_thread(gpu, event)
    with pytest.raises(CudaError, match=r"^cudaGraphLaunch of a graph that isn't captured"):
        graph.replay()


def test_an_event_is_recorded_before_it_is_used(gpu: FakeGpu) -> None:
    event = new_event(enable_timing=True)
    for use in (event.wait, event.synchronize, event.query, lambda: event.elapsed_time(recorded())):
        with pytest.raises(CudaError, match="of an event that was never recorded"):
            use()


def test_times_are_those_of_events_with_timing_that_have_passed(gpu: FakeGpu) -> None:
    timed, also, untimed = (recorded(enable_timing=each) for each in (True, True, False))
    with pytest.raises(CudaError, match="an event that hasn't passed"):
        timed.elapsed_time(also)
    assert not also.query()
    torch.cuda.synchronize()
    assert also.query()
    assert timed.elapsed_time(also) > 0
    for pair in ((timed, untimed), (untimed, timed)):
        with pytest.raises(CudaError, match="without timing"):
            pair[0].elapsed_time(pair[1])


def test_a_copy_reads_what_the_host_wrote_since(gpu: FakeGpu) -> None:
    host = staged(np.array([1, 2], np.int32), DEVICE)
    device = host.to(DEVICE, non_blocking=True)
    host[0] = 5
    assert device.tolist() == [5, 2]
    assert upload(np.array([7], np.int32), DEVICE).tolist() == [7]


def test_a_result_arrives_with_its_event(gpu: FakeGpu) -> None:
    host = torch.empty(2, dtype=torch.int32, pin_memory=True)
    host.copy_(torch.arange(2, dtype=torch.int32, device=DEVICE) + 3, non_blocking=True)
    event = recorded()
    assert host.tolist() == [-1, -1]
    event.synchronize()
    assert host.tolist() == [3, 4]
    assert gpu.queue.stalls == {"cudaEventSynchronize": 1}


def test_streams_are_ordered_by_events_alone(gpu: FakeGpu) -> None:
    source = torch.full((2,), 7, device=DEVICE)
    before = recorded()
    hosts = [torch.empty(2, dtype=source.dtype, pin_memory=True) for _ in range(2)]
    for host, waits in zip(hosts, (False, True), strict=True):
        with torch.cuda.stream(new_stream()):
            if waits:
                before.wait()
            host.copy_(source, non_blocking=True)
            recorded().synchronize()
    assert [host.tolist() for host in hosts] == [[-1, -1], [7, 7]]


def test_memory_that_was_let_go_of_belongs_to_its_stream(gpu: FakeGpu) -> None:
    hosts = [torch.empty(2, dtype=torch.int32, pin_memory=True) for _ in range(2)]
    for host, keeps in zip(hosts, (False, True), strict=True):
        source = torch.full((2,), 7, dtype=torch.int32, device=DEVICE)
        ready = recorded()
        with torch.cuda.stream(new_stream()):
            ready.wait()
            host.copy_(source, non_blocking=True)
            copied = recorded()
        kept = source if keeps else None
        del source
        torch.zeros(1, device=DEVICE)
        recorded().synchronize()  # the first stream runs ahead
        copied.synchronize()
        del kept
    assert [host.tolist() for host in hosts] == [[-1, -1], [7, 7]]


def test_a_replay_reads_memory_as_it_is_then(gpu: FakeGpu) -> None:
    numbers = torch.ones(2, device=DEVICE)
    graph, doubled = CudaCapturer().capture(lambda: numbers * 2)
    numbers.fill_(5)
    graph.replay()
    assert doubled.tolist() == [10, 10]
    assert numbers.device == doubled.device == DEVICE


def test_what_is_on_the_device_is_not_mixed_with_what_is_not(gpu: FakeGpu) -> None:
    numbers = torch.ones(2, device=DEVICE)
    with pytest.raises(CudaError, match="add of tensors on the CPU and on the device"):
        numbers + torch.ones(2)
    with pytest.raises(TypeError, match="on the device"):
        numbers.numpy()
