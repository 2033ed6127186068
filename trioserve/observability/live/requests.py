"""Requests as a picture shows them: where each is, how far it has come, and when it got there."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator

from trioserve.observability.live.schema import RequestRow
from trioserve.requests.request import FinishReason, Request, Sequence, State

_WORDS = {state: state.value for state in State} | {State.CREATED: State.TOKENIZING.value}


def request_row(
    request: Request,
    *,
    adapter_name: Callable[[int], str | None],
    offset: float,
    now: float,
    is_over: bool = False,
) -> RequestRow:
    """The row of ``request``.

    Args:
        request: of this process.
        adapter_name: what the adapter of that number is called.
        offset: what Unix time is ahead of trio's clock.
        now: the time on trio's clock.
        is_over: whether nobody waits for it any more; if it hadn't ended, that is its abort.
    """
    sequences = request.sequences
    first = next((each for each in sequences if each.state is not State.FINISHED), sequences[0])
    num_computed = num_output = num_pages = 0
    for each in sequences:
        num_output += len(each.output_ids)
        if each.compute is not None:
            num_computed += each.compute.computed
            num_pages += len(each.compute.pages)
    finish = first.finish if first.state is State.FINISHED else None
    state = State.FINISHED if is_over else first.state
    reason = FinishReason.ABORT if finish is None else finish.reason
    ended = state is State.FINISHED
    times = request.times
    return RequestRow(
        id=request.id,
        state=_WORDS[state],
        finish_reason=reason.value if ended else None,
        prompt_tokens=len(request.prompt_ids) or request.fewest_tokens,
        cached_tokens=request.num_cached_tokens,
        computed_tokens=num_computed,
        output_tokens=num_output,
        max_tokens=first.max_tokens or request.params.max_tokens,
        outputs=len(sequences),
        pages=num_pages,
        priority=request.priority,
        adapter=adapter_name(request.adapter) if request.adapter else None,
        timeline=[
            (_WORDS[state], round(time + offset, 4))
            for state, time in _timeline(request, first, (times.finished or now) if ended else None)
        ],
    )


def _timeline(
    request: Request, sequence: Sequence, ended: float | None
) -> Iterator[tuple[State, float]]:
    """States and when they began, on trio's clock.

    The times that every request keeps tell the straight way. What a sequence went through since it
    first lost its slot, it keeps itself.
    """
    times = request.times
    detours = sequence.detours or ()
    lost_at = detours[0][1] if detours else None
    straight = (
        (State.TOKENIZING, times.arrived),
        (State.WAITING, times.queued),
        (State.PREFILL, times.first_scheduled),
        (State.DECODE, times.first_token),
    )
    for state, time in straight:
        if time is not None and (lost_at is None or time <= lost_at):
            yield state, time
    yield from detours
    if ended is not None:
        yield State.FINISHED, ended


def newest_first(groups: Iterable[Iterable[Request]]) -> Iterator[Request]:
    """All requests of ``groups``, in each of which the newest comes first."""
    return heapq.merge(*groups, key=lambda request: -request.times.arrived)


def shown_requests(
    running: Iterable[Request], open_requests: Iterable[Request], most: int
) -> list[Request]:
    """At most ``most`` requests, the newest first: those that run, and the newest of the others.

    Looks at no more than twice as many.

    Args:
        running: those that hold slots; one may come several times.
        open_requests: all, the newest first.
        most: how many.
    """
    chosen = dict.fromkeys(itertools.islice(running, most))
    for request in itertools.islice(open_requests, most):
        if len(chosen) == most:
            break
        chosen[request] = None
    return sorted(chosen, key=lambda request: request.times.arrived, reverse=True)
