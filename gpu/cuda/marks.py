"""The marks in a device's work that time the kernels of its steps: events, or times of a clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

import attrs

from gpu.sampling.drawn import DeviceTimes

M = TypeVar("M")


@attrs.frozen(kw_only=True)
class Marks(Generic[M]):
    """The marks in a device's work from which the times of a step follow."""

    before: M
    """The end of the step before."""
    began: M
    kernels: list[tuple[M, M]]
    """The first and the last of kernels that follow each other without a break."""
    launch_ns: int

    @property
    def ended(self) -> M:
        """The end of the step."""
        return self.kernels[-1][1] if self.kernels else self.began

    def times(self, us_between: Callable[[M, M], float]) -> DeviceTimes:
        """Return the times; ``us_between`` gives the microseconds from one mark to another."""
        starts = [self.began, *(end for _, end in self.kernels)]
        gaps = zip(starts, (start for start, _ in self.kernels), strict=False)
        return DeviceTimes(
            step_us=round(sum(us_between(*each) for each in self.kernels)),
            gap_us=round(sum(us_between(*each) for each in gaps)),
            idle_us=round(us_between(self.before, self.began)),
            launch_us=self.launch_ns // 1000,
        )


@attrs.define
class Marking(Generic[M]):
    """The marks of the step that is being queued. ``mark`` sets one where the work has got to."""

    _mark: Callable[[], M]
    _ended: M = attrs.field(init=False)
    _began: M = attrs.field(init=False)
    _kernels: list[tuple[M, M]] = attrs.field(init=False, factory=list)
    _first: M | None = attrs.field(init=False, default=None)
    _first_ns: int = attrs.field(init=False, default=0)
    _launch_ns: int = attrs.field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self._began = self._ended = self._mark()

    def begin_step(self) -> None:
        """Begin a step, in which nothing has been queued."""
        self._began = self._mark()
        self._kernels, self._first, self._launch_ns = [], None, 0

    def begin_kernels(self) -> None:
        """Mark the place of the first kernel of several."""
        self._first, self._first_ns = self._mark(), time.perf_counter_ns()

    def end_kernels(self) -> None:
        """Mark the end of the last of them, unless that is done."""
        if self._first is None:
            return
        self._launch_ns += time.perf_counter_ns() - self._first_ns
        self._kernels.append((self._first, self._mark()))
        self._first = None

    def end_step(self) -> Marks[M]:
        """Return the marks of the step, after its last kernel has been queued."""
        self.end_kernels()
        marks = Marks(
            before=self._ended,
            began=self._began,
            kernels=self._kernels,
            launch_ns=self._launch_ns,
        )
        self._ended = marks.ended
        return marks
