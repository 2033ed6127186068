"""Faults of another process that no signal brings: a main thread that hangs, a socket that is cut.

This user has to be allowed to trace the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

__all__ = ["cut_off", "hung"]

_TRACER = """
import ctypes, os, sys
pid, libc = int(sys.argv[1]), ctypes.CDLL(None, use_errno=True)
for request in (0x4206, 0x4207):  # PTRACE_SEIZE, PTRACE_INTERRUPT
    if libc.ptrace(request, pid, None, None):
        raise OSError(ctypes.get_errno(), "ptrace")
print("hung", flush=True)
status = 0xFF
while not (os.WIFEXITED(status) or os.WIFSIGNALED(status)):
    status = os.waitpid(pid, 0x40000000)[1]  # __WALL; its parent hears of its end after this
"""
_PIDFD_GETFD = 438
_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def hung(pid: int) -> Iterator[None]:
    """Let the main thread of a process hang for the block; its other threads go on."""
    command = [sys.executable, "-c", _TRACER, str(pid)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as tracer:
        assert tracer.stdout is not None
        try:
            assert tracer.stdout.readline() == b"hung\n"
            yield
        finally:
            tracer.kill()  # which lets the thread go on


def cut_off(pid: int) -> None:
    """Shut down the Unix sockets of a process, as if their other ends were closed."""
    handle = os.pidfd_open(pid)
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                    _shut_down(_check(_libc.syscall(_PIDFD_GETFD, handle, int(name), 0)))
    finally:
        os.close(handle)


def _shut_down(descriptor: int) -> None:
    with socket.socket(fileno=descriptor) as copy:
        if copy.family == socket.AF_UNIX:
            copy.shutdown(socket.SHUT_RDWR)


def _check(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
