"""What a process that is all ours does with its memory once everything that stays is there."""

from __future__ import annotations

import ctypes
import gc

__all__ = ["settle"]


def settle() -> None:
    """Free what loading has left over, and have the collector never look at the rest again.

    The C library keeps what is freed for a process that goes on as it began; a server that has read
    its model's files doesn't.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
    gc.freeze()
