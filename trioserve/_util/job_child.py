"""The child's side of :mod:`~trioserve._util.job_processes`: limits and forks.

Messages are frames (:mod:`trioserve.protocol.frames`) over the standard streams.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import resource
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import IO, NoReturn

from trioserve.protocol.priority import lower_priority

NUM_FORK_FDS = 3
"""Descriptors that a new fork gets: its standard input, its standard output, its memory."""
READY, FORK, FORKED = b"ready", b"fork", b"forked"
"""Packets between the server and the process that forks."""


def go_behind(niceness: int) -> None:
    """Let the server and the worker go first, and leave no core dump."""
    lower_priority(niceness)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_memory(more: int) -> None:
    """Let the process map at most ``more`` bytes beyond what it has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + more)


def limit_processor_time(more: float) -> None:
    """End the process after ``more`` seconds of processor time from now, rounded up."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + more))


def _limit(kind: int, value: int) -> None:
    resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))


def serve_forks(control: int, do_jobs: Callable[[IO[bytes], IO[bytes], int], object]) -> NoReturn:
    """Fork this process whenever the server asks for it, until the server is gone.

    Called while the process has a single thread, and leads a process group.
    :mod:`~trioserve._util.job_server` is the server's side.

    Args:
        control: Descriptor of a socket for packets. Each one brings the descriptors of a fork, and
            is answered with a descriptor that refers to the new process.
        do_jobs: Does a fork's jobs; called with its input, its output and its memory.
    """
    # Objects that all forks have stay in the memory that they share.
    gc.freeze()
    with socket.socket(fileno=control) as server:
        server.send(READY)
        while True:
            _, descriptors, _, _ = socket.recv_fds(server, len(FORK), NUM_FORK_FDS)
            if not descriptors:
                break
            _reap()
            child = os.fork()
            if not child:
                _do_jobs(server, descriptors, do_jobs)
            # It can't refer to another process: this one reaps its forks later.
            reference = os.pidfd_open(child)
            socket.send_fds(server, [FORKED], [reference])
            for descriptor in (*descriptors, reference):
                os.close(descriptor)
    os.killpg(0, signal.SIGKILL)
    raise AssertionError


def _reap() -> None:
    """Let go of forks that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _do_jobs(
    server: socket.socket,
    descriptors: list[int],
    do_jobs: Callable[[IO[bytes], IO[bytes], int], object],
) -> NoReturn:
    try:
        server.close()
        source, target, memory = descriptors
        do_jobs(os.fdopen(source, "rb"), os.fdopen(target, "wb"), memory)
    finally:
        os._exit(1)  # At once: there may be no memory for more.
