"""A hung event loop is told of while it hangs, with its stack, by a thread that ends with it."""

from __future__ import annotations

import itertools
import logging
import re
import threading
import time
from collections.abc import Iterator

import pytest
import trio

from trioserve.observability.metrics import hang_watch, measure_loop_lag
from trioserve.observability.metrics.hang_watch import HangWatch
from trioserve.observability.metrics.loop_lag import LoopLag

SOON = 0.05
PATIENCE = 60.0


class Told(logging.Handler):
    """The lines about hangs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.more = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        if "event loop hangs" in record.getMessage():
            with self.more:
                self.lines.append(record.getMessage())
                self.more.notify_all()

    def hang_until(self, count: int) -> None:
        """Block this thread until there are so many lines."""
        with self.more:
            assert self.more.wait_for(lambda: len(self.lines) >= count, PATIENCE)


@pytest.fixture
def told() -> Iterator[Told]:
    handler, logger = Told(), logging.getLogger("trioserve.loop")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def watchers() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == "trioserve-hangs"]


def test_a_hang_is_told_while_it_lasts(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_watch, "AGAIN_AFTER", SOON)
    with HangWatch(SOON) as watch:
        told.hang_until(2)  # and again, later
        watch.beat()
        told.hang_until(3)  # and the next one
    (line, *_) = told.lines
    place = r" \((tests/)?observability/test_hang_watch\.py:"
    assert re.search("hang_until" + place, line)
    assert re.search("test_a_hang_is_told_while_it_lasts" + place, line)
    assert len(line) < 10_000
    assert not watchers()


def test_lines_about_one_hang_become_rare(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that goes on by itself, each wait of the thread being as long as it should."""
    now, times, left = 0.0, [], threading.Event()

    class Waits:
        def wait(self, seconds: float) -> bool:
            nonlocal now
            now += seconds
            return now > 1000

        def set(self) -> None:
            left.set()

    monkeypatch.setattr(hang_watch, "_shown", lambda _: times.append(now) or "")
    watch = HangWatch(2.0, lambda: now)
    watch._left = Waits()  # type: ignore[assignment]
    with watch:
        watch._thread.join(PATIENCE)
    assert times[0] == 2.0
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert gaps == [10, 20, 40, 80, 160, 320]


def test_nothing_is_told_of_a_machine_that_slept(told: Told) -> None:
    now, waits = 0.0, 0

    class Waits:
        def wait(self, seconds: float) -> bool:
            nonlocal now, waits
            waits += 1
            now += 3600.0  # no thread ran
            return waits > 5

        def set(self) -> None:
            """Ignore the end."""

    watch = HangWatch(2.0, lambda: now)
    watch._left = Waits()  # type: ignore[assignment]
    with watch:
        watch._thread.join(PATIENCE)
    assert waits == 6
    assert told.lines == []


def test_the_servers_task_watches(told: Told) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(measure_loop_lag, LoopLag())
            await trio.sleep(0.2)
            assert len(watchers()) == 1
            told.hang_until(1)
            nursery.cancel_scope.cancel()

    started = time.monotonic()
    trio.run(main)
    assert time.monotonic() - started >= hang_watch.HANGS_AFTER
    assert "hang_until (observability/test_hang_watch.py:" in told.lines[0]
    assert not watchers()
