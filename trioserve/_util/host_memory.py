"""Memory through which processes of one host hand large things to each other."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def host_memory(name: str) -> Iterator[str]:
    """Make empty memory for the block, and return a path at which this user's processes find it.

    It has no place in a file system, so nothing is left of it, however the processes end. Behind
    the block the path may be that of other memory: what is read has to be checked.

    Args:
        name: Name for the lists of the system.
    """
    descriptor = os.memfd_create(name)
    try:
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)
