"""Streams, events and graphs of one device, run lazily in an order that CUDA allows.

A stream does its work in order, and the streams of a device have no order but that of events. A
seed decides when work is done that no event forces.
"""

from __future__ import annotations

import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import attrs

__all__ = ["CudaError", "Graph", "Mark", "Queue", "Stream"]

LARGEST_BURST = 64


class CudaError(RuntimeError):
    """A call that CUDA refuses, or one with a result that it leaves open."""


@attrs.define(eq=False)
class Mark:
    """A place in a stream's work; ``time`` counts the work of all streams before it."""

    stream: Stream
    graph: Graph | None
    """The graph that it was captured in."""
    done: bool = False
    time: int = 0


@attrs.frozen
class _Work:
    run: Callable[[], None]


@attrs.frozen
class _Wait:
    """A wait for a mark of another stream."""

    mark: Mark


_Task = _Work | _Wait | Mark
"""A mark is set when its turn comes."""


@attrs.define(eq=False)
class Stream:
    """Work in its order. Handle 0 is the legacy default stream."""

    handle: int
    tasks: deque[_Task] = attrs.field(factory=deque)
    graph: Graph | None = None
    """The graph that is captured from it."""


@attrs.define(eq=False)
class Graph:
    """Captured work."""

    work: list[Callable[[], None]] = attrs.field(factory=list)
    finished: bool = False
    spoiled_by: str = ""
    """The call that was refused during the capture."""


@attrs.frozen
class _Capture:
    stream: Stream
    graph: Graph
    thread: int
    mode: str


class Queue:
    """The streams of one device, and the thread of the host that fills them.

    Args:
        seed: decides what is done before it must be.
        pace: the probability that a call of the host finds some work done since the last one.
    """

    def __init__(self, seed: int = 0, pace: float = 0.0) -> None:
        self.default = Stream(0)
        self.current = self.default
        self.streams = [self.default]
        self.stalls: Counter[str] = Counter()
        """Call -> how often the host had to wait for the device in it."""
        self._clock = 0
        self._host = threading.get_ident()
        self._changed = threading.Condition(threading.RLock())
        self._capture: _Capture | None = None
        self._waits_granted = 0
        self.restart(seed, pace)

    def restart(self, seed: int, pace: float, last: Stream | None = None) -> None:
        """Draw from ``seed`` from here on, and count stalls anew.

        The stream ``last`` does nothing before it must, whatever the pace.
        """
        self._random, self._pace, self._last = random.Random(seed), pace, last
        self.stalls.clear()

    def new_stream(self) -> Stream:
        """Add a stream."""
        stream = Stream(len(self.streams))
        self.streams.append(stream)
        return stream

    def stream_of(self, handle: int) -> Stream:
        """Return the stream that a driver's call names."""
        return self.streams[handle]

    def queue(self, stream: Stream, call: str, run: Callable[[], None]) -> None:
        """Queue work, or capture it."""
        self.check_stream(stream, call)
        with self._changed:
            if stream.graph is not None:
                stream.graph.work.append(run)
            else:
                stream.tasks.append(_Work(run))
                self._hurry()

    def mark(self, stream: Stream) -> Mark:
        """Queue a mark."""
        self.check_stream(stream, "cudaEventRecord")
        with self._changed:
            mark = Mark(stream, stream.graph)
            if stream.graph is None:
                stream.tasks.append(mark)
                self._hurry()
            return mark

    def wait(self, stream: Stream, mark: Mark) -> None:
        """Have ``stream`` wait for a mark in another."""
        self.check_stream(stream, "cudaStreamWaitEvent")
        if mark.graph is not stream.graph:
            if self._capture is not None and stream.graph is not None:
                self._refuse(self._capture, "cudaStreamWaitEvent for what isn't captured")
            raise CudaError("cudaStreamWaitEvent for what was captured, outside of the capture")
        if mark.graph is not None:
            return
        with self._changed:
            stream.tasks.append(_Wait(mark))
            self._hurry()

    def synchronize(self, mark: Mark, call: str) -> None:
        """Block until ``mark`` is set. Other threads than the host's wait until it waits, too."""
        self.refuse_in_capture(call)
        if mark.graph is not None:
            raise CudaError(f"{call} of an event that was captured")
        with self._changed:
            if threading.get_ident() != self._host:
                self._changed.wait_for(lambda: mark.done or self._waits_granted > 0)
                if not mark.done:
                    self._waits_granted = 0
            elif not mark.done:
                self.stalls[call] += 1
            self._force(mark)

    def drain(self, call: str) -> None:
        """Do all work of all streams."""
        self.refuse_in_capture(call)
        with self._changed:
            if any(stream.tasks for stream in self.streams):
                self.stalls[call] += 1
            for stream in self.streams:
                self._finish(stream)

    def drain_stream(self, stream: Stream, call: str) -> None:
        """Do all work of one stream."""
        self.refuse_in_capture(call)
        with self._changed:
            if stream.tasks:
                self.stalls[call] += 1
            self._finish(stream)

    @contextmanager
    def host_waits(self) -> Iterator[None]:
        """Let another thread's wait for an event be over, since the host waits for that thread."""
        with self._changed:
            self._waits_granted = 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._waits_granted = 0

    def begin_capture(self, graph: Graph, mode: str) -> None:
        """Capture what is queued in the current stream."""
        if self.current is self.default:
            raise CudaError("cudaStreamBeginCapture of the legacy default stream")
        self.refuse_in_capture("cudaStreamBeginCapture")
        self.current.graph = graph
        self._capture = _Capture(self.current, graph, threading.get_ident(), mode)

    def end_capture(self) -> None:
        """Finish the capture.

        Raises:
            CudaError: a call was refused during it.
        """
        assert self._capture is not None
        graph, self._capture.stream.graph = self._capture.graph, None
        self._capture = None
        if graph.spoiled_by:
            raise CudaError(f"cudaStreamEndCapture: the capture was spoiled by {graph.spoiled_by}")
        graph.finished = True

    def replay(self, graph: Graph) -> None:
        """Queue what was captured, in the current stream."""
        self.refuse_in_capture("cudaGraphLaunch")
        if not graph.finished:
            raise CudaError("cudaGraphLaunch of a graph that isn't captured")

        def run() -> None:
            for work in graph.work:
                work()

        self.queue(self.current, "cudaGraphLaunch", run)

    @property
    def captures(self) -> bool:
        """True if a capture goes on."""
        return self._capture is not None

    def refuse_in_capture(self, call: str) -> None:
        """Refuse ``call`` during a capture of this thread, or of any if its mode is global.

        Raises:
            CudaError: it isn't allowed.
        """
        capture = self._capture
        if capture is None:
            return
        if capture.mode == "global" or capture.thread == threading.get_ident():
            self._refuse(capture, call)

    def check_stream(self, stream: Stream, call: str) -> None:
        """Refuse work in the legacy default stream during a capture.

        Raises:
            CudaError: it isn't allowed.
        """
        if self._capture is not None and stream is self.default:
            self._refuse(self._capture, f"{call} in the legacy default stream")

    def _refuse(self, capture: _Capture, call: str) -> NoReturn:
        """Spoil a capture: it can't be finished, even if the error is caught."""
        capture.graph.spoiled_by = call
        raise CudaError(f"{call} is not permitted while a stream is captured")

    def _hurry(self) -> None:
        if self._random.random() >= self._pace:
            return
        stream = self._random.choice([each for each in self.streams if each is not self._last])
        for _ in range(self._random.randint(1, LARGEST_BURST)):
            if not self._advance(stream):
                return

    def _force(self, mark: Mark) -> None:
        while not mark.done:
            if not self._advance(mark.stream):
                head = mark.stream.tasks[0]
                assert isinstance(head, _Wait)
                self._force(head.mark)

    def _finish(self, stream: Stream) -> None:
        while stream.tasks:
            if not self._advance(stream):
                head = stream.tasks[0]
                assert isinstance(head, _Wait)
                self._force(head.mark)

    def _advance(self, stream: Stream) -> bool:
        """Do the first piece of a stream's work, unless there is none or it has to wait."""
        if not stream.tasks:
            return False
        task = stream.tasks[0]
        if isinstance(task, _Wait) and not task.mark.done:
            return False
        stream.tasks.popleft()
        self._clock += 1
        if isinstance(task, _Work):
            task.run()
        elif isinstance(task, Mark):
            task.done, task.time = True, self._clock
            self._changed.notify_all()
        return True
