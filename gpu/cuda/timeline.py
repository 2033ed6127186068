"""Where a step's work is queued: its start and end on the device, and the way of its outputs home.

On a GPU the steps follow each other in one stream. The outputs of a step are copied to the host in
a second stream, beside the next step's forward pass; a thread sleeps until a copy is done and then
makes a file descriptor readable. (A host function in the stream would do without the thread, but
CUDA doesn't call it once an error has happened, and who waits would never hear of it.)
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import attrs
import numpy.typing as npt
import torch

__all__ = ["Completions", "CudaTimeline", "Ending", "Finished", "HostTimeline", "Timeline"]


@attrs.frozen(kw_only=True)
class Finished:
    """A step that has ended: its outputs on the host, and its times in microseconds."""

    outputs: list[npt.NDArray[Any]]
    step_us: int
    idle_us: int


class Ending(Protocol):
    """The end of a step that is queued."""

    def wait(self) -> Finished:
        """Wait for it. To be called once for every step, in their order."""


class Timeline(Protocol):
    """The steps of one device, one after the other."""

    @property
    def completions(self) -> int | None:
        """See :attr:`gpu.executor.Executor.completions`."""

    def begin_step(self) -> None:
        """What is queued from here on is the next step's: it is ready to be launched."""

    def before_outputs(self) -> None:
        """What is queued from here on may overwrite the outputs of the step before."""

    def end_step(self, outputs: Sequence[torch.Tensor]) -> Ending:
        """All of the step is queued. Its ``outputs`` are copied to the host when it ends."""

    def skip_step(self) -> Ending:
        """A step with nothing to do: it ends with the one before it."""


class HostTimeline:
    """:class:`Timeline` of the CPU, where work is done when it is called."""

    def __init__(self) -> None:
        self._began_ns = self._ended_ns = time.perf_counter_ns()

    @property
    def completions(self) -> None:
        """Nothing is ever pending."""
        return None

    def begin_step(self) -> None:
        """See :meth:`Timeline.begin_step`."""
        self._began_ns = time.perf_counter_ns()

    def before_outputs(self) -> None:
        """Outputs are copied where a step ends."""

    def end_step(self, outputs: Sequence[torch.Tensor]) -> Ending:
        """See :meth:`Timeline.end_step`."""
        idle_ns = self._began_ns - self._ended_ns
        self._ended_ns = time.perf_counter_ns()
        return _Ended(
            Finished(
                outputs=[output.numpy().copy() for output in outputs],
                step_us=(self._ended_ns - self._began_ns) // 1000,
                idle_us=idle_ns // 1000,
            )
        )

    def skip_step(self) -> Ending:
        """See :meth:`Timeline.skip_step`."""
        return _Ended(Finished(outputs=[], step_us=0, idle_us=0))


@attrs.frozen
class _Ended:
    _finished: Finished

    def wait(self) -> Finished:
        return self._finished


class CudaTimeline:
    """:class:`Timeline` of a GPU: the current stream, and one more for the outputs."""

    def __init__(self, device: torch.device) -> None:
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._completions = Completions()
        self._began = self._timed_event()
        self._ended = self._timed_event()
        self._copied: torch.cuda.Event | None = None

    @property
    def completions(self) -> int:
        """See :attr:`Timeline.completions`."""
        return self._completions.descriptor

    def begin_step(self) -> None:
        """See :meth:`Timeline.begin_step`."""
        self._began = self._timed_event()

    def before_outputs(self) -> None:
        """See :meth:`Timeline.before_outputs`."""
        if self._copied is not None:
            self._copied.wait()

    def end_step(self, outputs: Sequence[torch.Tensor]) -> Ending:
        """See :meth:`Timeline.end_step`."""
        ended = self._timed_event()
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._copies):
            ended.wait()
            hosts = [
                torch.empty(output.shape, dtype=output.dtype, pin_memory=True) for output in outputs
            ]
            for host, output in zip(hosts, outputs, strict=True):
                host.copy_(output, non_blocking=True)
            copied.record()
        ending = _CudaEnding(
            completions=self._completions,
            hosts=hosts,
            before=self._ended,
            began=self._began,
            ended=ended,
            copied=copied,
        )
        self._ended, self._copied = ended, copied
        self._completions.add(copied)
        return ending

    def skip_step(self) -> Ending:
        """See :meth:`Timeline.skip_step`."""
        self._completions.add(None)
        return _Skipped(self._completions)

    @staticmethod
    def _timed_event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


@attrs.frozen(kw_only=True)
class _CudaEnding:
    completions: Completions
    hosts: list[torch.Tensor]
    before: torch.cuda.Event  # the end of the step before
    began: torch.cuda.Event
    ended: torch.cuda.Event
    copied: torch.cuda.Event

    def wait(self) -> Finished:
        self.completions.take()
        self.copied.synchronize()  # has passed; raises what went wrong on the device
        return Finished(
            # Pinned memory goes back to torch's pool with its tensor: the arrays are copies.
            outputs=[host.numpy().copy() for host in self.hosts],
            step_us=round(self.began.elapsed_time(self.ended) * 1000),
            idle_us=round(self.before.elapsed_time(self.began) * 1000),
        )


@attrs.frozen
class _Skipped:
    _completions: Completions

    def wait(self) -> Finished:
        self._completions.take()
        return Finished(outputs=[], step_us=0, idle_us=0)


class _Waitable(Protocol):
    def synchronize(self) -> None: ...


class Completions:
    """Events that pass one after the other, as a file descriptor.

    A thread waits for each in its order. It lives as long as the process: a worker has one device.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_Waitable | None] = queue.SimpleQueue()
        flags = os.EFD_CLOEXEC | os.EFD_SEMAPHORE
        self.descriptor = os.eventfd(0, flags)
        """Readable while more events have passed than were taken."""
        threading.Thread(target=self._watch, name="completions", daemon=True).start()

    def add(self, event: _Waitable | None) -> None:
        """The next event to wait for; None stands for one that passes with the one before it."""
        self._queue.put(event)

    def take(self) -> None:
        """Wait until one more event has passed, and count it as taken."""
        os.eventfd_read(self.descriptor)

    def _watch(self) -> None:
        while True:
            event = self._queue.get()
            try:
                if event is not None:
                    event.synchronize()
            except RuntimeError:
                pass  # who takes it synchronizes again, and hears of the error
            os.eventfd_write(self.descriptor, 1)
