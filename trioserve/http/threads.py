"""Long work on what the engine gave, in a thread: so that it holds up nobody else's stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import trio

from trioserve.generation import Completion
from trioserve.stream import TokenLogprob

__all__ = ["LONG", "num_in_entries", "num_logprobs", "run_if_long"]

LONG = 1000
"""Log-probabilities, of which about 100 are put into words in a millisecond."""

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


async def run_if_long(weight: int, work: Callable[[], Result]) -> Result:
    """What ``work`` gives: here if it is short, else from a thread, of which there is one at most.

    A second one would only take the event loop's turns away. If this is cancelled, the thread goes
    on by itself, and what it gives is dropped.

    Args:
        weight: about how many log-probabilities there are to go over.
    """
    if weight <= LONG:
        return work()
    try:
        limiter = _limiter.get()
    except LookupError:
        limiter = trio.CapacityLimiter(1)
        _limiter.set(limiter)
    return await trio.to_thread.run_sync(work, limiter=limiter, abandon_on_cancel=True)
