"""The end of a child process that leads a process group of its own."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

import trio

KILL_GRACE = 10.0
"""Seconds for a killed child to exit. A child that waits in the kernel takes until then."""


async def end_child(process: trio.Process, log: Any, name: str) -> None:
    """Kill ``process`` and its process group, and close its standard input.

    Called shielded; takes at most ``KILL_GRACE``. A stopped process ends like any other.

    Args:
        process: Process started with ``start_new_session`` and a pipe as standard input.
        log: Logs a process that doesn't end.
        name: Name of the process in the log.
    """
    assert process.stdin is not None
    # Children of the process may hold memory that the next one needs. The group may be gone or
    # belong to another user by now.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with trio.move_on_after(KILL_GRACE):
        await process.wait()
    if process.returncode is None:
        log.error(f"{name} can't be killed", pid=process.pid, seconds=KILL_GRACE)
    await process.stdin.aclose()
