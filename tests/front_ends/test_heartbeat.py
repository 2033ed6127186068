"""A front end that gives no sign of life: when it counts as hung, and what is excused."""

from __future__ import annotations

import math

import pytest
import trio
import trio.testing

from trioserve import EngineConfig
from trioserve.front_ends.heartbeat import MIN_PATIENCE, Heartbeat, interval_of, patience_of
from trioserve.observability.tracing import FLUSH_SECONDS
from trioserve.protocol.errors import FrontEndLost
from trioserve.scheduler.hang_detection import SECOND_LOOK

Clock = trio.testing.MockClock


async def lives_until(heartbeat: Heartbeat) -> float:
    """Return the time at which it is given up."""
    with pytest.raises(FrontEndLost, match="no sign of life within 8 s") as caught:
        await heartbeat.watch()
    assert caught.value.is_hung
    return trio.current_time()


async def test_it_counts_as_hung_when_no_sign_comes(autojump_clock: Clock) -> None:
    assert await lives_until(Heartbeat(8.0)) == 8 + SECOND_LOOK


async def test_every_sign_gives_it_time_again(autojump_clock: Clock) -> None:
    heartbeat = Heartbeat(8.0)

    async def live() -> None:
        for _ in range(5):
            await trio.sleep(7.9)
            heartbeat.beat()
        # While this process looks a second time, it counts.
        await trio.sleep(8.5)
        heartbeat.beat()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(live)
        died = await lives_until(heartbeat)
    assert died == pytest.approx(5 * 7.9 + 8.5 + 8 + SECOND_LOOK)


async def test_an_engine_process_that_was_stopped_itself_forgives_once(
    autojump_clock: Clock,
) -> None:
    """Pause both processes, as a paused container does."""
    heartbeat = Heartbeat(8.0)
    autojump_clock.autojump_threshold = math.inf
    async with trio.open_nursery() as nursery:

        async def watch() -> None:
            assert await lives_until(heartbeat) == 1000 + 8 + SECOND_LOOK

        nursery.start_soon(watch)
        await trio.testing.wait_all_tasks_blocked()
        autojump_clock.jump(1000)
        autojump_clock.autojump_threshold = 0


def test_its_patience_is_the_watchdogs() -> None:
    assert patience_of(EngineConfig("m", watchdog_timeout=0)) == math.inf
    assert patience_of(EngineConfig("m", watchdog_timeout=90)) == 90
    assert patience_of(EngineConfig("m", watchdog_timeout=1)) == MIN_PATIENCE
    # At its end a front end sends its last spans first, and one sign may have just been due.
    config = EngineConfig("m", watchdog_timeout=1)
    assert FLUSH_SECONDS + interval_of(config) < patience_of(config)
