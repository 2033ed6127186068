"""The priority of processes beside the worker's steps."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_THREADS, _AUTOGROUP = Path("/proc/self/task"), Path("/proc/self/autogroup")


def lower_priority(niceness: int) -> None:
    """Raise the niceness of this process's threads, and that of its session if it leads one.

    Where Linux groups processes by session (``sched_autogroup_enabled``), each session has the same
    share of the cores, whatever the niceness of its processes.
    """
    for thread in _THREADS.iterdir():
        number = int(thread.name)
        with contextlib.suppress(ProcessLookupError):  # It has ended meanwhile.
            before = os.getpriority(os.PRIO_PROCESS, number)
            os.setpriority(os.PRIO_PROCESS, number, max(before, niceness))
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):  # There are no such groups.
            _AUTOGROUP.write_text(str(niceness))
