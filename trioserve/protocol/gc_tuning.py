"""Garbage collection and free memory of a process of trioserve's own, at its start and later."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator

_COLLECT_AFTER = 50_000
"""Objects that the process has to have grown by before the collector looks for cycles."""


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Disable the garbage collector in the block, which imports.

    Imports leave no garbage, and looking for it takes a fifth of their time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def give_back() -> None:
    """Return free memory to the system; the C library would keep it for the process."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


def settle() -> None:
    """Free what loading has left over, and exclude the remaining objects from later collections.

    The C library keeps freed memory in case the process needs it again. A server that has read its
    model's files doesn't.
    """
    gc.collect()
    give_back()
    gc.freeze()


@contextlib.contextmanager
def rare_collections() -> Iterator[Callable[[], None]]:
    """Make the garbage collector stop the event loop seldom and briefly.

    Yield a function to call once every object that stays for good exists.

    Reference counts free nearly everything that a request leaves. At Python's settings, the
    collector took a sixth of a busy server's time and now and then stopped all streams for a tenth
    of a second, mostly to look through objects that were there from the start. Those are excluded
    from then on. Only a process of trioserve's own may call this.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(_COLLECT_AFTER, *thresholds[1:])

    try:
        yield settle
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
