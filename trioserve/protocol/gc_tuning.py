"""Garbage collection and free memory in trioserve's own processes."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator

_COLLECT_AFTER = 50_000
"""Number of new objects after which the garbage collector looks for cycles."""


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Disable the garbage collector for a block of imports, and exclude what they make for good.

    Imports leave no garbage, and looking for it takes a fifth of their time. Call this only in
    trioserve's own processes.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def trim_memory() -> None:
    """Return free memory to the system, which the C library would keep for the process."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


def freeze_objects() -> None:
    """Free garbage and unused memory, and exclude the remaining objects from later collections.

    Call this after loading: a server doesn't need the memory again that reading files took.
    """
    gc.collect()
    trim_memory()
    gc.freeze()


@contextlib.contextmanager
def rare_collections() -> Iterator[Callable[[], None]]:
    """Make collections rare and short in the block.

    Yield a function to be called when all long-lived objects exist.

    Reference counts free nearly all objects of a request. With Python's settings, the collector
    took a sixth of a busy server's time and sometimes stopped all streams for a tenth of a second,
    mostly to scan objects that existed from the start. The function excludes these objects. Call
    this only in trioserve's own processes.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(_COLLECT_AFTER, *thresholds[1:])

    try:
        yield freeze_objects
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
