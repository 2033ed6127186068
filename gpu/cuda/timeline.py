"""Times of a step on its device, and the way of its outputs to the host.

A step is copies, the kernels of the forward pass, and the kernels of the sampler. Only the time in
which kernels run counts as the step's: a device that copies, or that waits for the host to make a
mask for the sampler, computes nothing. Kernels that are launched one by one may wait for the host
between two of them, which no event shows; the time that the host took to launch them tells.

On a GPU the steps follow each other in one stream. The outputs of a step are copied to the host in
a second stream, beside the next step's forward pass; a thread sleeps until a copy is done and then
makes a file descriptor readable. (A host function in the stream would do without the thread, but
CUDA doesn't call it once an error has happened, and the waiting thread would never hear of it.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import attrs
import numpy.typing as npt
import torch

from gpu._util.completions import Completions
from gpu.cuda.marks import Marking, Marks
from gpu.sampling.drawn import DeviceTimes

M = TypeVar("M")


@attrs.frozen(kw_only=True)
class FinishedStep:
    """A step that has ended: its outputs on the host, and its times in microseconds."""

    outputs: list[npt.NDArray[Any]]
    times: DeviceTimes


class StepEnd(Protocol):
    """The end of a step that is queued."""

    def wait(self) -> FinishedStep:
        """Wait for it. To be called once for every step, in their order."""


class Timeline(Protocol):
    """The steps of one device, one after the other."""

    @property
    def completions(self) -> int | None:
        """See :attr:`gpu.executor.Executor.completions`."""

    def begin_step(self) -> None:
        """Begin the next step, which is ready to be launched, with its copies."""

    def begin_forward(self) -> None:
        """Begin the kernels of the forward pass, now that all copies are queued."""

    def end_forward(self) -> None:
        """End them: the last one is queued."""

    def begin_sampling(self) -> None:
        """Begin the sampler's kernels, which may overwrite the outputs of the step before."""

    def end_step(self, outputs: Sequence[torch.Tensor]) -> StepEnd:
        """Return all of the step is queued. Its ``outputs`` are copied to the host when it ends."""

    def skip_step(self) -> StepEnd:
        """Return a step with nothing to do: it ends with the one before it."""


class _Marked(Generic[M]):
    """The part of a :class:`Timeline` that marks where kernels begin and end."""

    def __init__(self, mark: Callable[[], M]) -> None:
        self._marking = Marking(mark)

    def begin_step(self) -> None:
        """See :meth:`Timeline.begin_step`."""
        self._marking.begin_step()

    def begin_forward(self) -> None:
        """See :meth:`Timeline.begin_forward`."""
        self._marking.begin_kernels()

    def end_forward(self) -> None:
        """See :meth:`Timeline.end_forward`."""
        self._marking.end_kernels()

    def begin_sampling(self) -> None:
        """See :meth:`Timeline.begin_sampling`."""
        self._marking.begin_kernels()


class HostTimeline(_Marked[int]):
    """:class:`Timeline` of the CPU, where work is done when it is called."""

    def __init__(self) -> None:
        super().__init__(time.perf_counter_ns)

    @property
    def completions(self) -> None:
        """Return at once: no event is ever pending."""
        return None

    def end_step(self, outputs: Sequence[torch.Tensor]) -> StepEnd:
        """See :meth:`Timeline.end_step`."""
        return _Ended(
            FinishedStep(
                outputs=[output.numpy().copy() for output in outputs],
                times=self._marking.end_step().times(lambda start, end: (end - start) / 1000),
            )
        )

    def skip_step(self) -> StepEnd:
        """See :meth:`Timeline.skip_step`."""
        return _Ended(FinishedStep(outputs=[], times=DeviceTimes()))


@attrs.frozen
class _Ended:
    _finished: FinishedStep

    def wait(self) -> FinishedStep:
        return self._finished


class CudaTimeline(_Marked[torch.cuda.Event]):
    """:class:`Timeline` of a GPU: the current stream, and one more for the outputs."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(_timed_event)
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._completions = Completions()
        self._copied: torch.cuda.Event | None = None

    @property
    def completions(self) -> int:
        """See :attr:`Timeline.completions`."""
        return self._completions.descriptor

    def begin_sampling(self) -> None:
        """See :meth:`Timeline.begin_sampling`."""
        if self._copied is not None:
            self._copied.wait()
        super().begin_sampling()

    def end_step(self, outputs: Sequence[torch.Tensor]) -> StepEnd:
        """See :meth:`Timeline.end_step`."""
        marks = self._marking.end_step()
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._copies):
            marks.ended.wait()
            hosts = [
                torch.empty(output.shape, dtype=output.dtype, pin_memory=True) for output in outputs
            ]
            for host, output in zip(hosts, outputs, strict=True):
                host.copy_(output, non_blocking=True)
            copied.record()
        ending = _CudaEnding(completions=self._completions, hosts=hosts, marks=marks, copied=copied)
        self._copied = copied
        self._completions.add(copied)
        return ending

    def skip_step(self) -> StepEnd:
        """See :meth:`Timeline.skip_step`."""
        self._completions.add(None)
        return _Skipped(self._completions)


def _timed_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


@attrs.frozen(kw_only=True)
class _CudaEnding:
    completions: Completions
    hosts: list[torch.Tensor]
    marks: Marks[torch.cuda.Event]
    copied: torch.cuda.Event

    def wait(self) -> FinishedStep:
        self.completions.take()
        self.copied.synchronize()  # has passed; raises what went wrong on the device
        return FinishedStep(
            # Pinned memory goes back to torch's pool with its tensor: the arrays are copies.
            outputs=[host.numpy().copy() for host in self.hosts],
            times=self.marks.times(lambda start, end: start.elapsed_time(end) * 1000),
        )


@attrs.frozen
class _Skipped:
    _completions: Completions

    def wait(self) -> FinishedStep:
        self._completions.take()
        return FinishedStep(outputs=[], times=DeviceTimes())
