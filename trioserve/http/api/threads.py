"""Long work on large requests and answers, in a thread: no other stream waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import trio

from trioserve.protocol.errors import InvalidRequest
from trioserve.requests.generation import Completion
from trioserve.requests.stream import TokenLogprob

LONG = 1000
"""Log-probabilities, of which about 100 are put into words in a millisecond."""

LONG_BODY = 64 << 10
"""Bytes of a body, which take up to about 20 milliseconds to read."""

Result = TypeVar("Result")


def num_logprobs(completions: Iterable[Completion]) -> int:
    """How many log-probabilities there are to tell of what the engine gave."""
    total = 0
    for completion in completions:
        if (prompt := completion.prompt_logprobs) is not None:
            total += len(completion.prompt_token_ids) * prompt.num_for_each
        total += sum(num_in_entries(output.logprobs) for output in completion.outputs)
    return total


def num_in_entries(entries: Iterable[TokenLogprob] | None) -> int:
    """How many log-probabilities ``entries`` hold."""
    return sum(1 + len(entry.top) + len(entry.asked) for entry in entries or ())


_limiter: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("long work")


async def run_if_long(weight: int, work: Callable[[], Result], *, most: int = LONG) -> Result:
    """Return what ``work`` gives: here if it is short, else from the one thread for long work.

    A second one would only take the event loop's turns away. If this is cancelled, the thread goes
    on by itself, and what it gives is dropped.

    Args:
        weight: about how many log-probabilities there are to go over, or another measure.
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
    """Return what ``work`` gives, or why it refuses that.

    An error that trio carries out of a thread is part of a cycle of references, so it would keep
    everything that its traceback leads to, a body of 32 MiB among it, until the collector comes.
    """
    try:
        return work()
    except InvalidRequest as error:
        error.__traceback__ = error.__context__ = None
        return error
