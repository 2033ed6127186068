"""The ends of processes that tests kill."""

from __future__ import annotations

import psutil
import trio


async def wait_ended(*processes: psutil.Process) -> None:
    """Block until the processes have ended, and so have closed their pipes."""
    while not all(map(_has_ended, processes)):
        await trio.sleep(0.01)


def _has_ended(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
