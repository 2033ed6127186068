"""Unwrap the exception that matters from a nursery's exception group."""

from __future__ import annotations

import trio


def sole_exception(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the exception that a nursery's group stands for, one level down.

    A nursery wraps the exception of its block in a group, beside the cancellations of its tasks. If
    the tasks raise nothing of their own, the block's exception is the only one that is no
    cancellation. If there are only cancellations, the first stands for all.
    """
    for error in group.exceptions:
        if not _is_cancellation(error):
            return error
    return group.exceptions[0]


def holds_cancellation(error: BaseException) -> bool:
    """Return True if ``error`` is a cancellation, or a group that contains one.

    Such an exception has to reach its scope, through every nursery on the way.
    """
    if isinstance(error, BaseExceptionGroup):
        return any(holds_cancellation(inner) for inner in error.exceptions)
    return isinstance(error, trio.Cancelled)


def _is_cancellation(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(_is_cancellation(inner) for inner in error.exceptions)
    return isinstance(error, trio.Cancelled)
