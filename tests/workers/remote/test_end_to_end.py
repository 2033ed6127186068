"""Clients of a server whose only worker is on another host, and is reached over TLS."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from tests.faults.leftovers import nothing_held
from tests.faults.stage import serve_here
from tests.support.other_hosts import (
    LONG,
    address_of,
    agent_for,
    leave_at,
    open_mock_engine,
    running,
    wait_states,
)
from tests.support.tiny_models import make_tiny
from trioserve import Engine
from trioserve.workers.remote.certificates import make_certificates

STEP = 0.05


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[Engine, int]]:
    """Serve an engine with one worker, which has joined."""
    model = make_tiny("qwen3", folder / "model")
    make_certificates(tls := folder / "tls")
    async with (
        open_mock_engine(model, tls, STEP) as engine,
        running(agent_for(address_of(engine), tls, model)),
    ):
        await wait_states(engine, "running", "running")
        await engine.remove_worker(0)
        async with serve_here(engine) as port:
            yield engine, port


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "silent"])
async def test_a_disconnect_closes_the_slot_on_the_other_host(stream: bool, tmp_path: Path) -> None:
    async with served(tmp_path) as (engine, port):
        (report,) = engine.workers
        assert (report.host, report.index) == ("other", 1)
        leave = trio.Event()
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(lambda: leave_at(leave, port, stream=stream))
            with trio.fail_after(20):
                while (await engine.call_worker("statistics"))["open_slots"] < 3:
                    await trio.sleep(STEP)
            leave.set()
        await nothing_held(engine)  # in the engine and in the worker
        (report,) = engine.workers
        # No answer was computed to its end.
        assert 0 < report.num_steps < LONG
