"""Steps' ends: what is copied, what is timed, and the descriptor that says a step is done."""

from __future__ import annotations

import select
import threading
import time

import torch

from gpu.timeline import Completions, HostTimeline


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


def test_outputs_on_the_host_are_copies() -> None:
    timeline = HostTimeline()
    output = torch.tensor([1, 2, 3], dtype=torch.int32)
    timeline.begin_step()
    ending = timeline.end_step([output[:2]])
    output.zero_()
    assert [array.tolist() for array in ending.wait().outputs] == [[1, 2]]


def test_idle_time_lies_between_steps() -> None:
    timeline = HostTimeline()
    timeline.begin_step()
    timeline.end_step([])
    time.sleep(0.02)
    assert timeline.skip_step().wait().step_us == 0
    timeline.begin_step()
    time.sleep(0.01)
    finished = timeline.end_step([]).wait()
    assert finished.idle_us >= 20_000
    assert finished.step_us >= 10_000
    timeline.begin_step()
    assert timeline.end_step([]).wait().idle_us < finished.idle_us
