"""Short versions of the fault tests in ``bench/faults/``, and the parts that those are made of."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio

from trioserve.errors import NoRoomForWorker, WorkerLost
from trioserve.worker.supervisor import Supervisor


async def test_no_room_for_a_worker_is_a_pause_however_long(autojump_clock: object) -> None:
    starts = 0

    @asynccontextmanager
    async def open_worker() -> AsyncIterator[Any]:
        nonlocal starts
        starts += 1
        if 2 <= starts < 52:
            raise NoRoomForWorker("No space left on device")
        yield None, None

    async def attach(*_: object) -> None:
        if starts == 1:
            raise WorkerLost("killed", from_outside=True)
        await trio.sleep_forever()

    supervisor = Supervisor(open_worker=open_worker, max_restarts=3, judge=lambda _: 1)
    with trio.move_on_after(3600) as scope:
        await supervisor.run(attach)
    assert scope.cancelled_caught
    assert (starts, supervisor.restarts) == (52, 1)
