"""Taking the one exception that matters out of what a nursery wrapped it in."""

from __future__ import annotations

import trio


def sole_exception(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The exception that a nursery's group stands for, one level down.

    A nursery adds one level of group around whatever its block raised, and the cancellations of its
    tasks beside it. With tasks that raise nothing of their own, the block's exception is the only
    one that is no cancellation; where there is none, a cancellation stands for them all.
    """
    for error in group.exceptions:
        if not _is_cancellation(error):
            return error
    return group.exceptions[0]


def holds_cancellation(error: BaseException) -> bool:
    """Whether ``error`` is a cancellation, or a group with one somewhere in it.

    Such an exception has to reach the scope that it belongs to, through every nursery on its way.
    """
    if isinstance(error, BaseExceptionGroup):
        return any(holds_cancellation(inner) for inner in error.exceptions)
    return isinstance(error, trio.Cancelled)


def _is_cancellation(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(_is_cancellation(inner) for inner in error.exceptions)
    return isinstance(error, trio.Cancelled)
