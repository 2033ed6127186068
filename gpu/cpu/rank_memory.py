"""The memory that the ranks of a worker share."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator


class RankMemory:
    """Memory that is zeros at first, and is touched as it is needed.

    Args:
        pages: Of this process alone, or mapped from the file of :func:`open_shared_file`.
    """

    def __init__(self, pages: mmap.mmap) -> None:
        self._pages = pages
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        """Address of its first byte in this process."""

    @classmethod
    def of_one_rank(cls, size: int) -> RankMemory:
        """Return ``size`` bytes for the only rank."""
        return cls(mmap.mmap(-1, size))

    @classmethod
    def of_file(cls, descriptor: int) -> RankMemory:
        """Return all bytes of an open file, which may be closed then."""
        return cls(mmap.mmap(descriptor, 0))


@contextlib.contextmanager
def open_shared_file(size: int) -> Iterator[int]:
    """Yield the descriptor of a file of ``size`` bytes in memory.

    The file has no name: only processes that inherit the descriptor can map it, and it is gone with
    the last of them.
    """
    descriptor = os.memfd_create("trioserve-ranks")
    try:
        os.ftruncate(descriptor, size)
        yield descriptor
    finally:
        os.close(descriptor)
