"""What a process that is all ours does with its memory while it starts, and when it has started."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator

__all__ = ["importing", "settle"]


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """No cycles are looked for in the block, which imports: it would take a fifth of the time.

    Imports make no garbage worth looking for.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


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
