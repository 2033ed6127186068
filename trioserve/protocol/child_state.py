"""The end of a child process, or a stop that isn't over soon."""

from __future__ import annotations

import os
import time

_LOOKS = 5
_LOOK_SECONDS = 0.05


def wait_ended_or_stopped(pid: int) -> bool:
    """Block until the child ``pid`` has ended, or has been stopped for a quarter of a second.

    It isn't reaped. A child that is stopped and continued together with this process goes on: if
    this one is continued first, it looks again some times. Only a signal's stops are seen,
    not a debugger's, nor those of a container that is paused.

    Returns:
        True if it is stopped.
    """
    try:
        while _is_stopped(pid, os.WEXITED):
            if _stays_stopped(pid):
                return True
    except ChildProcessError:  # it has ended
        pass
    return False


def _stays_stopped(pid: int) -> bool:
    for _ in range(_LOOKS):
        time.sleep(_LOOK_SECONDS)
        if not _is_stopped(pid, os.WNOHANG):
            return False
    return True


def _is_stopped(pid: int, option: int) -> bool:
    """Return True if the child is stopped; without ``WNOHANG``, block until it is or has ended."""
    found = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT | option)
    return found is not None and found.si_code == os.CLD_STOPPED
