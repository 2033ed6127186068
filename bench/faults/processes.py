"""What ``/proc`` says of a process: its memory, descriptors, threads and children (Linux only)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

import attrs


@attrs.frozen(kw_only=True)
class Footprint:
    """What a process holds at one moment."""

    resident_bytes: int
    descriptors: int
    threads: int


def footprint(pid: int) -> Footprint:
    """The footprint of process ``pid``.

    Raises:
        OSError: there is no such process, or it is another user's.
    """
    status = _status(pid)
    return Footprint(
        # A process that has ended and wasn't waited for has no memory any more.
        resident_bytes=int(status.get("VmRSS", "0 kB").split()[0]) * 1024,
        descriptors=len(os.listdir(f"/proc/{pid}/fd")),
        threads=int(status["Threads"]),
    )


def _status(pid: int) -> Mapping[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    pairs = (line.split(":", 1) for line in lines)
    return {name: value.strip() for name, value in pairs}


def children_of(pid: int) -> list[int]:
    """The children of process ``pid``, whichever of its threads started them."""
    children = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                children += [int(child) for child in (task / "children").read_text().split()]
    return children


def is_worker(pid: int) -> bool:
    """Whether process ``pid`` is a worker that is alive, or stands in for one."""
    with contextlib.suppress(OSError):
        return b"--connect" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return False


def workers_of(pid: int) -> list[int]:
    """The workers among the children of process ``pid``."""
    return [child for child in children_of(pid) if is_worker(child)]
