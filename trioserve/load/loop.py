"""Runs of requests: closed loops, and open loops with arrivals drawn in advance.

In a *closed loop* a fixed number of streams send the next request after each answer, so the server
sets the pace. In an *open loop* requests are sent at their arrival times, however many are still
running, like independent users. Each has its own task, so a slow request never delays another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import trio

from trioserve.load.records import Record, Run
from trioserve.load.target import AnyTarget, Sender
from trioserve.load.work import Conversation, request_fields, single

Work = Sequence[Conversation | Mapping[str, Any]]
"""Conversations. A dict of a body's fields stands for a conversation of one request."""


@attrs.define(eq=False)
class Progress:
    """The counts of a run in progress."""

    total: int = 0
    """Number of requests, if no conversation ends early."""
    done: int = 0
    failed: int = 0
    cancelled: int = 0
    _events: int = 0
    _running: dict[int, Record] = attrs.field(factory=dict)

    @property
    def running(self) -> int:
        """Number of requests that have been sent and not completed."""
        return len(self._running)

    @property
    def events(self) -> int:
        """Number of events with a choice so far: about as many as tokens."""
        return self._events + sum(len(record.chunks) for record in self._running.values())

    def begin(self, record: Record) -> None:
        """Count a sent request."""
        self._running[id(record)] = record

    def end(self, record: Record) -> None:
        """Count a finished request."""
        del self._running[id(record)]
        self._events += len(record.chunks)
        self.done += 1
        self.failed += bool(record.error)
        self.cancelled += record.cancelled


async def closed_loop(
    target: AnyTarget, requests: Work, concurrency: int, *, progress: Progress | None = None
) -> Run:
    """Send ``requests`` over ``concurrency`` streams until all are answered.

    Raises:
        ValueError: There are no requests, or ``concurrency`` is below 1.
    """
    if not requests or concurrency < 1:
        raise ValueError("a closed loop needs requests and a concurrency of at least 1")
    work = _Load(target.chat, _conversations(requests), progress or Progress())
    queue = iter(range(len(requests)))
    async with target.senders() as sender:
        started = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(min(concurrency, len(requests))):
                nursery.start_soon(_run_stream, work, sender, queue)
        duration = trio.current_time() - started
    return Run(concurrency=concurrency, records=work.in_order(), duration=duration, started=started)


async def open_loop(
    target: AnyTarget,
    requests: Work,
    arrivals: Sequence[float],
    *,
    rate: float | None = None,
    max_concurrency: int | None = None,
    progress: Progress | None = None,
) -> Run:
    """Send each of ``requests`` at its arrival time, and wait until all are answered.

    Args:
        target: The server or engine.
        requests: The conversations.
        arrivals: Times of their first turns, in seconds from the start, ascending.
        rate: Requests per second, to be reported.
        max_concurrency: Most conversations at a time; the others wait, as in a gateway. Their
            latency doesn't include the wait.
        progress: Takes the counts.

    Raises:
        ValueError: There are no requests, another number of arrivals, or a limit below 1.
    """
    if not requests or len(requests) != len(arrivals):
        raise ValueError("an open loop needs requests and an arrival for each")
    if max_concurrency is not None and max_concurrency < 1:
        raise ValueError("an open loop needs a bound of at least 1, or none")
    work = _Load(target.chat, _conversations(requests), progress or Progress())
    room = None if max_concurrency is None else trio.CapacityLimiter(max_concurrency)
    async with target.senders() as sender:
        started = trio.current_time()
        async with trio.open_nursery() as nursery:
            for number, at in enumerate(arrivals):
                await trio.sleep_until(started + at)
                nursery.start_soon(_run_arrival, work, sender, number, started + at, room)
        duration = trio.current_time() - started
    return Run(
        concurrency=max_concurrency,
        records=work.in_order(),
        duration=duration,
        rate=rate,
        started=started,
    )


def _conversations(requests: Work) -> list[Conversation]:
    return [one if isinstance(one, Conversation) else single(one) for one in requests]


@attrs.define(eq=False)
class _Load:
    """The conversations of a run, and the records of its requests so far."""

    chat: bool
    conversations: list[Conversation]
    progress: Progress
    records: dict[tuple[int, int], Record] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.progress.total += sum(len(one.turns) for one in self.conversations)

    def in_order(self) -> list[Record]:
        return [self.records[place] for place in sorted(self.records)]

    async def run_conversation(self, sender: Sender, number: int, scheduled: float | None) -> None:
        """Send the turns of a conversation until one fails or is cancelled."""
        conversation = self.conversations[number]
        answers: list[str] = []
        for place, turn in enumerate(conversation.turns):
            fields = request_fields(conversation, place, answers, chat=self.chat)
            if turn.pause:
                await trio.sleep(turn.pause)
            record = Record(
                started=trio.current_time(),
                scheduled=None if place else scheduled,
                conversation=number,
                turn=place,
            )
            self.records[number, place] = record
            self.progress.begin(record)
            try:
                await sender.ask(fields, record, turn.cancel)
            finally:
                self.progress.end(record)
            if record.error or record.cancelled:
                return
            if turn.form is not None and record.finish_reason != "length":
                record.valid = turn.form(record.text)
            answers.append(record.text)


async def _run_stream(work: _Load, sender: Sender, queue: Iterator[int]) -> None:
    for number in queue:
        await work.run_conversation(sender, number, None)


async def _run_arrival(
    work: _Load,
    sender: Sender,
    number: int,
    scheduled: float,
    room: trio.CapacityLimiter | None,
) -> None:
    if room is None:
        await work.run_conversation(sender, number, scheduled)
    else:
        async with room:
            await work.run_conversation(sender, number, scheduled)
