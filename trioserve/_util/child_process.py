"""The end of a child process that leads a process group of its own."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

import trio

KILL_GRACE = 10.0
"""Seconds for a child that was killed. One that waits in the kernel can't be had sooner."""


async def end_child(process: trio.Process, log: Any, name: str) -> None:
    """Kill ``process``, if it hasn't ended, and whatever it has started; close its standard input.

    Called shielded; takes at most ``KILL_GRACE``. A stopped process ends like any other.

    Args:
        process: was started with ``start_new_session``, and its standard input is a pipe.
        log: is told if it can't be had.
        name: what it is, for the log.
    """
    assert process.stdin is not None
    # What it has started may hold memory that the next one needs. A group that is gone, or that
    # belongs to somebody else by now, isn't to be had.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with trio.move_on_after(KILL_GRACE):
        await process.wait()
    if process.returncode is None:
        log.error(f"{name} can't be killed", pid=process.pid, seconds=KILL_GRACE)
    await process.stdin.aclose()
