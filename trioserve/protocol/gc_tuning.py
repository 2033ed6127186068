"""What a process that is all ours does with its memory while it starts, and when it has started."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator

_COLLECT_AFTER = 50_000
"""By how many objects the process has to have grown before cycles are looked for among them."""


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


def give_back() -> None:
    """Give free memory back to the system, which the C library would keep for the process."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def settle() -> None:
    """Free what loading has left over, and have the collector never look at the rest again.

    The C library keeps what is freed for a process that goes on as it began; a server that has read
    its model's files doesn't.
    """
    gc.collect()
    give_back()
    gc.freeze()


@contextlib.contextmanager
def rare_collections() -> Iterator[Callable[[], None]]:
    """Have the garbage collector hold up the event loop seldom and briefly.

    Gives what is to be called once everything is there that stays.

    Nearly everything that a request leaves is freed without it. At Python's settings it took a
    sixth of a busy server's time, and stopped all streams for a tenth of a second now and then,
    mostly to look through what was there from the start, which is left out from then on. This is
    for a process that is all ours.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(_COLLECT_AFTER, *thresholds[1:])

    try:
        yield settle
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
