"""Requests in a snapshot: state, progress and times."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator

from trioserve.observability.live.schema import RequestRow
from trioserve.requests.prompts import media_in
from trioserve.requests.request import FinishReason, Request, Sequence, State

_WORDS = {state: state.value for state in State} | {State.CREATED: State.TOKENIZING.value}
_WORDS_WITH_MEDIA = {**_WORDS, **dict.fromkeys((State.CREATED, State.TOKENIZING), "encoding")}


def request_row(
    request: Request,
    *,
    adapter_name: Callable[[int], str | None],
    worker: int | None,
    offset: float,
    now: float,
    is_over: bool = False,
) -> RequestRow:
    """Return the row of ``request``.

    Args:
        request: of this process.
        adapter_name: the name of the adapter with that number.
        worker: the number of the worker that computes it.
        offset: the difference of Unix time and trio's clock.
        now: the time on trio's clock.
        is_over: whether the caller has left; a request that hadn't ended counts as aborted.
    """
    sequences = request.sequences
    first = next((each for each in sequences if each.state is not State.FINISHED), sequences[0])
    num_computed = num_output = num_pages = 0
    for each in sequences:
        num_output += len(each.output_ids)
        if each.seq_state is not None:
            num_computed += each.seq_state.computed
            num_pages += len(each.seq_state.pages)
    finish = first.finish if first.state is State.FINISHED else None
    state = State.FINISHED if is_over else first.state
    reason = FinishReason.ABORT if finish is None else finish.reason
    ended = state is State.FINISHED
    times = request.times
    words = _WORDS_WITH_MEDIA if media_in(request.prompt) else _WORDS
    return RequestRow(
        id=request.id,
        state=words[state],
        finish_reason=reason.value if ended else None,
        prompt_tokens=len(request.prompt_ids) or request.fewest_tokens,
        cached_tokens=request.num_cached_tokens,
        computed_tokens=num_computed,
        output_tokens=num_output,
        max_tokens=first.max_tokens or request.params.max_tokens,
        outputs=len(sequences),
        pages=num_pages,
        worker=worker,
        moves=request.num_moves,
        priority=request.priority,
        adapter=adapter_name(request.adapter) if request.adapter else None,
        timeline=[
            (words[state], round(time + offset, 4))
            for state, time in _timeline(request, first, (times.finished or now) if ended else None)
        ],
    )


def _timeline(
    request: Request, sequence: Sequence, ended: float | None
) -> Iterator[tuple[State, float]]:
    """Yield states and their beginnings, on trio's clock.

    The request's own times give the usual course. A sequence that lost its slot records its later
    states itself.
    """
    times = request.times
    history = sequence.history or ()
    lost_at = history[0][1] if history else None
    straight = (
        (State.TOKENIZING, times.arrived),
        (State.WAITING, times.queued),
        (State.PREFILL, times.first_scheduled),
        (State.DECODE, times.first_token),
    )
    for state, time in straight:
        if time is not None and (lost_at is None or time <= lost_at):
            yield state, time
    yield from history
    if ended is not None:
        yield State.FINISHED, ended


def newest_first(groups: Iterable[Iterable[Request]]) -> Iterator[Request]:
    """Yield all requests of ``groups``, each of which has the newest first."""
    return heapq.merge(*groups, key=lambda request: -request.times.arrived)


def shown_requests(
    running: Iterable[Request], open_requests: Iterable[Request], most: int
) -> list[Request]:
    """Return at most ``most`` requests, the newest first: running ones, then the newest others.

    At most twice as many are looked at.

    Args:
        running: those that hold slots; one may come several times.
        open_requests: all, the newest first.
        most: the limit.
    """
    chosen = dict.fromkeys(itertools.islice(running, most))
    for request in itertools.islice(open_requests, most):
        if len(chosen) == most:
            break
        chosen[request] = None
    return sorted(chosen, key=lambda request: request.times.arrived, reverse=True)
