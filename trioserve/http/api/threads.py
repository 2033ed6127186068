"""Thread for long work on large requests and answers, so that other streams don't wait for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import trio

from trioserve.protocol.errors import InvalidRequest
from trioserve.requests.generation import Completion
from trioserve.requests.stream import TokenLogprob

LONG = 1000
"""Number of log-probabilities that is long work; about 100 are encoded in a millisecond."""

TENSOR_BYTES = 8 << 10
"""Bytes of arrays that are encoded in the time of one log-probability."""

LONG_BODY = 64 << 10
"""Bytes of a body that is long work; they take up to about 20 milliseconds to parse."""

Result = TypeVar("Result")


def num_logprobs(completions: Iterable[Completion]) -> int:
    """Return the number of log-probabilities in the engine's outputs; arrays count for some."""
    total = 0
    for completion in completions:
        if (prompt := completion.prompt_logprobs) is not None:
            total += len(completion.prompt_token_ids) * prompt.num_for_each
        total += sum(num_in_entries(output.logprobs) for output in completion.outputs)
        arrays = [completion.tensors, *(output.tensors for output in completion.outputs)]
        num_bytes = sum(array.nbytes for each in arrays for array in each.values())
        total += num_bytes // TENSOR_BYTES
    return total


def num_in_entries(entries: Iterable[TokenLogprob] | None) -> int:
    """Return the number of log-probabilities in ``entries``."""
    return sum(1 + len(entry.top) + len(entry.asked) for entry in entries or ())


_limiter: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("long work")


async def run_if_long(weight: int, work: Callable[[], Result], *, most: int = LONG) -> Result:
    """Return the result of ``work``: run here if it is short, else in the one thread for long work.

    A second thread would only take turns from the event loop. If this is cancelled, the thread goes
    on, and its result is dropped.

    Args:
        weight: about how many log-probabilities there are to process, or another measure.
        most: the largest weight of short work.
    """
    if weight <= most:
        return work()
    try:
        limiter = _limiter.get()
    except LookupError:
        limiter = trio.CapacityLimiter(1)
        _limiter.set(limiter)
    done = await trio.to_thread.run_sync(_attempt, work, limiter=limiter, abandon_on_cancel=True)
    try:
        if isinstance(done, InvalidRequest):
            raise done
        return done
    finally:
        del done  # Or its traceback would lead to it.


def _attempt(work: Callable[[], Result]) -> Result | InvalidRequest:
    """Return the result of ``work``, or the error by which it refuses.

    An error that trio carries out of a thread is part of a reference cycle. It would keep
    everything that its traceback leads to, such as a body of 32 MiB, until the garbage collector
    runs.
    """
    try:
        return work()
    except InvalidRequest as error:
        error.__traceback__ = error.__context__ = None
        return error
