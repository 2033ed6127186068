"""Virtual runs of trio: the same seed gives the same order, without a thread and in no time."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import trio
import trio.testing
from trio._core import _run

from trioserve.testing.virtual import CancelAtCheckpoint, check_trio, run_virtual


def test_trio_has_what_virtual_runs_lean_on() -> None:
    check_trio()


def test_a_changed_trio_is_named_with_where_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(_run, "_r")
    with pytest.raises(AssertionError, match=r"_r is gone.*trioserve/testing/virtual\.py"):
        check_trio()


async def race() -> list[tuple[float, int]]:
    """Tasks that wake at the same moments."""
    order: list[tuple[float, int]] = []

    async def wake(number: int) -> None:
        for _ in range(3):
            await trio.sleep(60)
            order.append((trio.current_time(), number))

    async with trio.open_nursery() as nursery:
        for number in range(6):
            nursery.start_soon(wake, number)
    return order


def test_a_seed_is_an_order() -> None:
    orders = [run_virtual(race, seed=seed) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])


def test_the_random_numbers_of_trio_are_put_back() -> None:
    before = _run._r.getstate(), _run._ALLOW_DETERMINISTIC_SCHEDULING
    run_virtual(race, seed=1)
    assert (_run._r.getstate(), _run._ALLOW_DETERMINISTIC_SCHEDULING) == before


def test_threads_are_none() -> None:
    async def main() -> tuple[float, int]:
        ran_in = await trio.to_thread.run_sync(threading.get_ident)
        return trio.current_time(), ran_in

    before = trio.to_thread.run_sync
    (first, thread), (second, _) = run_virtual(main, seed=1), run_virtual(main, seed=2)
    assert thread == threading.get_ident()
    assert 0 < first != second > 0
    assert trio.to_thread.run_sync is before


def test_a_function_in_a_thread_is_abandoned_only_where_that_is_allowed() -> None:
    async def main(abandon: bool) -> bool:
        called = mock.Mock()
        with trio.move_on_after(0):
            await trio.lowlevel.checkpoint_if_cancelled()
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_in_thread, called, abandon)
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
        return bool(called.called)

    assert run_virtual(main, True) is False
    assert run_virtual(main, False) is True


async def _in_thread(function: Any, abandon: bool) -> None:
    await trio.to_thread.run_sync(function, abandon_on_cancel=abandon)


def test_somebody_may_look_whenever_time_is_about_to_jump() -> None:
    looks = []
    run_virtual(race, on_idle=lambda: looks.append(1))
    assert len(looks) == 3


@pytest.mark.parametrize("when_woken", [False, True])
def test_a_block_is_left_at_the_checkpoint_that_is_asked_for(when_woken: bool) -> None:
    async def main(counter: CancelAtCheckpoint) -> int:
        passed = 0
        events = [trio.Event() for _ in range(3)]

        async def set_all() -> None:
            for event in events:
                await trio.sleep(1)
                event.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(set_all)
            with counter.watch():
                for event in events:
                    await event.wait()
                    passed += 1
            nursery.cancel_scope.cancel()
        return passed

    def passes(number: int | None) -> tuple[int, int]:
        counter = CancelAtCheckpoint(number, when_woken=when_woken)
        passed: int = run_virtual(main, counter, instruments=[counter])
        return passed, counter.count

    assert passes(None) == (3, 3)
    # What it had waited for was there: it is called away at the next one.
    assert [passes(number)[0] for number in (1, 2, 3)] == ([1, 2, 3] if when_woken else [0, 1, 2])


def test_the_program_on_the_simulation_page_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "simulation.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.S)
    names: dict[str, Any] = {}
    exec(program, names)
    names["test_a_dead_worker_changes_nothing"]()
