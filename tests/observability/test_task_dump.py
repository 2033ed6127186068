"""A dump of all tasks: what it shows, that it is bounded, and that it is safe at any time."""

from __future__ import annotations

import functools
import math
import re
import threading
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any

import pytest
import trio
import trio.testing

from trioserve.observability import task_dump
from trioserve.observability.task_dump import ask_others, dump_tasks, reporting
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import open_fake_engine


async def sleeper() -> None:
    await trio.sleep_forever()


async def patient(seconds: float) -> None:
    with trio.move_on_after(seconds):
        await sleeper()


async def family() -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sleeper, name="child")
        await sleeper()


async def dump_beside(*functions: Callable[[], Any]) -> list[str]:
    """Return the lines of a dump while tasks of ``functions`` wait; this task's nursery is the
    last.
    """
    async with trio.open_nursery() as nursery:
        for function in functions:
            nursery.start_soon(function)
        await trio.testing.wait_all_tasks_blocked()
        text = dump_tasks()
        nursery.cancel_scope.cancel()
    return text.splitlines()


def part(lines: list[str], title: str) -> list[str]:
    """Return the line with ``title`` and those below it, without their common indent."""
    start = next(index for index, line in enumerate(lines) if line.strip().startswith(title))
    indent = len(lines[start]) - len(lines[start].lstrip())
    found = [lines[start][indent:]]
    for line in lines[start + 1 :]:
        if len(line) - len(line.lstrip()) <= indent:
            break
        found.append(line[indent:])
    return found


async def test_a_task_is_shown_with_its_stack_and_its_nurseries_below() -> None:
    lines = await dump_beside(family)
    shown = part(lines, f"{__name__}.family: waiting")
    calls = [line for line in shown if line.startswith("    ") and " in " in line]
    line = family.__code__.co_firstlineno + 3
    assert re.fullmatch(
        rf"    (tests/observability/)?test_task_dump\.py:{line} in family", calls[0]
    )
    assert shown[shown.index(calls[0]) + 1] == "        await sleeper()"
    assert calls[1].endswith(" in sleeper")
    assert calls[2].endswith(" in sleep_forever")
    nursery = shown.index("  nursery")
    assert shown[nursery + 1].startswith("    child: waiting")
    assert not any("_traps.py" in line for line in lines)


async def test_the_task_that_asks_is_running() -> None:
    lines = await dump_beside()
    (title,) = [line.strip() for line in lines if ": running" in line]
    calls = [line for line in part(lines, title)[1:] if " in " in line]
    assert calls[-1].endswith(" in dump_beside")
    assert calls[-2].endswith(" in test_the_task_that_asks_is_running")


async def test_those_who_are_alike_are_shown_once(autojump_clock: object) -> None:
    """Show the nearest of their deadlines. A task without one isn't equal."""
    patients = [functools.partial(patient, seconds) for seconds in (100.0, 7.0, 100.0, math.inf)]
    lines = [line.strip() for line in await dump_beside(*patients, *[family] * 20)]
    titles = [line for line in lines if ": waiting" in line]
    assert [title for title in titles if "family" in title] == [f"20 x {__name__}.family: waiting"]
    assert titles.count("child: waiting") == 1
    assert [title for title in titles if "patient" in title] == [
        f"3 x {__name__}.patient: waiting, deadline in 7.0 s",
        f"{__name__}.patient: waiting",
    ]


async def test_what_is_cancelled_or_about_to_go_on_is_told_apart(autojump_clock: object) -> None:
    event = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(event.wait, name="woken")
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as inner:
                inner.cancel_scope.shield = True
                inner.start_soon(sleeper, name="shielded")
                nursery.start_soon(trio.sleep_forever, name="waits")
                await trio.testing.wait_all_tasks_blocked()
                event.set()
                scope.cancel()
                before = {line.strip() for line in dump_tasks().splitlines()}
                inner.cancel_scope.cancel()
                after = {line.strip() for line in dump_tasks().splitlines()}
        nursery.cancel_scope.cancel()
    assert {"woken: ready", "shielded: waiting", "waits: waiting", "nursery (shielded)"} <= before
    assert {"shielded: cancelled", "nursery (cancelled, shielded)"} <= after


async def test_async_generators_and_foreign_coroutines_are_no_obstacle() -> None:
    async def items() -> AsyncIterator[int]:
        yield 1
        await sleeper()

    async def reader() -> None:
        async for _ in items():
            pass

    class Foreign:
        """A coroutine as an extension module makes them: it has no frames."""

        def __init__(self) -> None:
            self._inner = sleeper()

        def __await__(self) -> Generator[Any, Any, None]:
            return self

        def __iter__(self) -> Generator[Any, Any, None]:
            return self

        def __next__(self) -> Any:
            return self._inner.send(None)

        def send(self, value: Any) -> Any:
            return self._inner.send(value)

        def throw(self, *error: Any) -> Any:
            return self._inner.throw(*error)

    async def stranger() -> None:
        await Foreign()  # type: ignore[misc]

    lines = await dump_beside(reader, stranger)
    assert any(line.endswith("items") for line in part(lines, _title(lines, "reader")))
    assert any(line.endswith("stranger") for line in part(lines, _title(lines, "stranger")))


_THREADS = re.compile(r"(\d+ x )?thread \d")


def _title(lines: list[str], name: str) -> str:
    return next(line.strip() for line in lines if f"{name}: waiting" in line)


async def test_many_levels() -> None:
    depth = 300
    done = trio.Event()

    async def nest(left: int) -> None:
        async with trio.open_nursery() as nursery:
            if left:
                nursery.start_soon(nest, left - 1, name="level")
            else:
                await done.wait()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(nest, depth)
        await trio.testing.wait_all_tasks_blocked()
        title, *lines = dump_tasks().splitlines()
        done.set()
    assert int(title.split()[0]) > depth
    assert sum(line.strip().startswith("level: waiting") for line in lines) == depth
    # Threads of earlier tests may still be there, so only the tree's lines are counted.
    threads = next((i for i, line in enumerate(lines) if _THREADS.match(line)), len(lines))
    assert threads < task_dump.MAX_LINES + 100


async def test_a_dump_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_dump, "MAX_STACKS", 20)
    title, *_ = await dump_beside(*[sleeper] * 30)
    number, words = title.split(" ", 1)
    assert int(number) > 30
    assert words == "trio tasks, 20 of them shown:"
    monkeypatch.setattr(task_dump, "MAX_LINES", 10)
    lines = await dump_beside(family)
    tree = lines[: next(i for i, line in enumerate(lines) if "left out" in line)]
    assert len(tree) < 40
    assert max(map(len, lines)) <= task_dump.MAX_COLUMNS


async def test_reports_come_first_and_a_broken_one_hinders_nobody() -> None:
    def broken() -> str:
        raise ValueError("no")

    with reporting(lambda: "all is well"):
        with reporting(broken):
            first, second, third, *_ = dump_tasks().splitlines()
        assert [first, second] == ["all is well", "a report failed: ValueError('no')"]
        assert third.endswith(" trio tasks:")
    assert dump_tasks().splitlines()[0].endswith(" trio tasks:")


async def test_others_are_asked_and_those_that_are_gone_hinder_nobody() -> None:
    asked: list[str] = []

    def gone() -> None:
        raise ProcessLookupError

    with reporting(str, ask=gone), reporting(str, ask=lambda: asked.append("worker")):
        ask_others()
    ask_others()
    assert asked == ["worker"]


async def test_other_threads_are_shown() -> None:
    entered, leave = threading.Event(), threading.Event()

    def busy_thread() -> None:
        entered.set()
        leave.wait(30)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, busy_thread)
        await trio.to_thread.run_sync(entered.wait)
        text = dump_tasks()
        leave.set()
    threads = text[text.index("\nthread ") :]
    assert "in test_other_threads_are_shown.<locals>.busy_thread" in threads
    assert "leave.wait(30)" in threads


def test_equal_threads_are_shown_once() -> None:
    leave = threading.Event()

    def idle_thread() -> None:
        leave.wait(30)

    idle = [threading.Thread(target=idle_thread) for _ in range(40)]

    async def dump() -> str:
        for each in idle:
            each.start()
        deadline = trio.current_time() + 30
        while "\n40 x thread " not in (text := dump_tasks()):
            assert trio.current_time() < deadline, text
            await trio.sleep(0.01)  # some have not reached their wait yet
        leave.set()
        return text

    text = trio.run(dump)
    title = next(line for line in text.splitlines() if line.startswith("40 x thread "))
    assert any(str(each.ident) in title for each in idle)
    assert text.count("<locals>.idle_thread\n") == 1


def test_there_is_none_where_trio_doesnt_run() -> None:
    with pytest.raises(RuntimeError):
        dump_tasks()
    ask_others()


async def test_an_engines_dump_tells_its_state_and_its_tasks(autojump_clock: object) -> None:
    async with open_fake_engine(lambda: FakeWorker(step_time=1.0), max_num_seqs=1) as engine:
        async with engine.generate("x", max_tokens=5) as first:
            async with engine.generate("y", max_tokens=5):
                await first.receive()
                text = dump_tasks()
    assert text.startswith(
        "engine fake\n"
        "requests open: 2; outputs on their way to the line: 0, waiting: 1, running: 1\n"
        "plans in flight: 1; steps done: 1; pages held: 1 of 256; worker restarts: 0; "
    )
    assert "event loop's worst recent lag: 0.000 s\n" in text
    for function in (
        "PlanSender.run",
        "Scheduler._receive",
        "Detokenizer.run",
        "TokenizerTask.run",
    ):
        assert f" in {function}\n" in text
    assert not dump_tasks().startswith("engine")
