"""Bounds on what a decoder may take."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

__all__ = ["address_space_bounded"]


@contextlib.contextmanager
def address_space_bounded(more: int) -> Iterator[None]:
    """Let this process map at most ``more`` bytes beyond what it has, while the block lasts.

    An allocation past that raises MemoryError, or ends the process where native code doesn't ask.
    """
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
