"""Steps' ends: what is copied, what is timed, and the descriptor that says a step is done."""

from __future__ import annotations

import select
import threading
import time

import attrs
import pytest
import torch

from gpu._util.completions import Completions
from gpu.cuda.marks import Marking
from gpu.cuda.timeline import CudaTimeline, HostTimeline, Timeline
from gpu.kernels import KernelLoader
from gpu.sampling.drawn import DeviceTimes


def is_readable(descriptor: int, seconds: float = 0.0) -> bool:
    return bool(select.select([descriptor], [], [], seconds)[0])


class FakeEvent:
    """An event of a device that passes when a test says so."""

    def __init__(self, error: str = "") -> None:
        self.passed = threading.Event()
        self._error = error

    def synchronize(self) -> None:
        assert self.passed.wait(10)
        if self._error:
            raise RuntimeError(self._error)


def test_the_descriptor_is_readable_while_an_event_has_passed_and_is_not_taken() -> None:
    completions = Completions()
    first, second = FakeEvent(), FakeEvent()
    for event in (first, second):
        completions.add(event)
    second.passed.set()
    assert not is_readable(completions.descriptor, 0.02)  # one after the other
    first.passed.set()
    assert is_readable(completions.descriptor, 10)
    completions.take()
    assert is_readable(completions.descriptor, 10)
    completions.take()
    assert not is_readable(completions.descriptor)


def test_a_skipped_step_ends_with_the_one_before_it() -> None:
    completions = Completions()
    event = FakeEvent()
    completions.add(event)
    completions.add(None)
    assert not is_readable(completions.descriptor, 0.02)
    event.passed.set()
    completions.take()
    completions.take()
    assert not is_readable(completions.descriptor)


def test_an_event_that_fails_counts_as_passed_and_the_next_is_waited_for() -> None:
    completions = Completions()
    broken, fine = FakeEvent("device-side assert"), FakeEvent()
    for event in (broken, fine):
        completions.add(event)
        event.passed.set()
    completions.take()
    completions.take()
    assert not is_readable(completions.descriptor)


@pytest.fixture
def timeline(loader: KernelLoader) -> Timeline:
    return HostTimeline() if loader.device.type == "cpu" else CudaTimeline(loader.device)


def check_finished(timeline: Timeline) -> None:
    """Assert that a step that has ended shows, if steps can be pending at all."""
    assert timeline.completions is None or is_readable(timeline.completions, 60)


def test_outputs_are_those_of_their_step(timeline: Timeline, loader: KernelLoader) -> None:
    output = torch.zeros(3, dtype=torch.int32, device=loader.device)
    endings = []
    for step in range(4):
        timeline.begin_step()
        timeline.begin_sampling()
        output.fill_(step)
        endings.append(timeline.end_step([output[:2], output.float()]))
    for step, ending in enumerate(endings):
        check_finished(timeline)
        ints, floats = ending.wait().outputs
        assert ints.tolist() == [step] * 2
        assert floats.tolist() == [float(step)] * 3
    assert timeline.completions is None or not is_readable(timeline.completions)


def test_idle_time_lies_between_steps(timeline: Timeline) -> None:
    timeline.begin_step()
    timeline.end_step([]).wait()
    time.sleep(0.5)
    skipped = timeline.skip_step()
    check_finished(timeline)
    assert skipped.wait().times == DeviceTimes()
    timeline.begin_step()
    times = timeline.end_step([]).wait().times
    assert times.idle_us >= 500_000
    assert times.step_us == times.gap_us == times.launch_us == 0
    timeline.begin_step()
    assert timeline.end_step([]).wait().times.idle_us < times.idle_us


@attrs.define
class Clock:
    """A device's clock, in microseconds, as far as its work has got."""

    now: int = 0

    def mark(self) -> int:
        return self.now


def between(start: int, end: int) -> float:
    return end - start


def test_only_kernels_are_the_step_s_time() -> None:
    clock = Clock()
    marking = Marking(clock.mark)
    clock.now += 7  # nothing to do
    marking.begin_step()
    clock.now += 30  # copies
    marking.begin_kernels()
    clock.now += 1000
    marking.end_kernels()
    clock.now += 50  # the host makes a mask
    marking.begin_kernels()
    clock.now += 200
    times = marking.end_step().times(between)
    assert (times.idle_us, times.gap_us, times.step_us) == (7, 80, 1200)
    clock.now += 3
    marking.begin_step()
    clock.now += 2
    marking.begin_kernels()
    clock.now += 500
    marking.end_kernels()
    clock.now += 90  # nothing is sampled: the device waits for the next step
    times = marking.end_step().times(between)
    assert (times.idle_us, times.gap_us, times.step_us) == (3, 2, 500)
    marking.begin_step()
    assert marking.end_step().times(between).idle_us == 90


def test_launching_takes_the_host_s_time(timeline: Timeline) -> None:
    timeline.begin_step()
    time.sleep(0.2)
    timeline.begin_forward()
    time.sleep(0.05)
    timeline.end_forward()
    time.sleep(0.2)
    timeline.begin_sampling()
    time.sleep(0.05)
    times = timeline.end_step([]).wait().times
    assert times.launch_us >= 100_000
    assert times.gap_us >= 400_000
    assert times.step_us >= 100_000
