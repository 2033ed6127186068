"""The front ends that are connected, and the questions that all of them are asked."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Awaitable, Callable, Iterator

import attrs
import trio

from trioserve.front_ends.server.session import FrontEndSession
from trioserve.observability.live.requests import newest_first
from trioserve.observability.live.schema import TaskNode
from trioserve.observability.metrics.snapshot import MetricsSnapshot, add_up
from trioserve.protocol.errors import TrioserveError
from trioserve.requests.request import Request

ANSWER_SECONDS = 2.0
"""Time for a front end to answer. The last answer counts for one that doesn't."""
LOOK_SECONDS = 0.5
"""Time to answer for a snapshot, which another will follow soon."""


@attrs.define(eq=False)
class Peers:
    """The sessions of all front ends. Iterating gives their open requests."""

    _sessions: dict[FrontEndSession, None] = attrs.field(init=False, factory=dict)
    _departed: MetricsSnapshot = attrs.field(init=False, factory=MetricsSnapshot)
    """The counts of front ends that are gone."""

    def __iter__(self) -> Iterator[Request]:
        return itertools.chain.from_iterable(list(peer.requests) for peer in self._sessions)

    @property
    def sessions(self) -> list[FrontEndSession]:
        """The sessions of the front ends that are there."""
        return list(self._sessions)

    @property
    def have_requests(self) -> bool:
        """True if a front end has a request open."""
        return any(peer.requests for peer in self._sessions)

    def newest_requests(self) -> Iterator[Request]:
        """Return all open requests, the newest first."""
        return newest_first(reversed(peer.requests) for peer in self._sessions)

    @contextlib.contextmanager
    def connected(self, peer: FrontEndSession) -> Iterator[None]:
        """Count ``peer`` among the front ends while the block lasts."""
        self._sessions[peer] = None
        try:
            yield
        finally:
            del self._sessions[peer]
            self._departed = add_up([self._departed, peer.counted.snapshot.lasting])

    def counted(self, own: MetricsSnapshot) -> MetricsSnapshot:
        """Return ``own`` plus the counts of all front ends, as of their last answers."""
        snapshots = [peer.counted.snapshot for peer in self._sessions]
        return add_up([own, self._departed, *snapshots])

    async def count(self) -> None:
        """Ask all front ends for their counts."""

        async def ask(peer: FrontEndSession) -> None:
            peer.counted = await peer.calls.count()

        await self._ask_all(ask)

    async def look_around(self) -> list[TaskNode]:
        """Return the tasks of all front ends, in the order of their names."""

        async def ask(peer: FrontEndSession) -> None:
            looked = await peer.calls.look()
            peer.counted, peer.tasks = looked.counted, looked.tasks

        await self._ask_all(ask, LOOK_SECONDS)
        told = [peer.tasks for peer in self._sessions if peer.tasks is not None]
        return sorted(told, key=lambda tasks: tasks.name)

    async def abort(self, ids: list[str], prefix: bool) -> int:
        """Have all front ends abort by name; return how many requests were ended.

        A front end knows the requests that are still being tokenized, too.
        """
        answers: list[int] = []

        async def ask(peer: FrontEndSession) -> None:
            answers.append(await peer.calls.abort_own(ids, prefix))

        await self._ask_all(ask)
        return sum(answers)

    async def _ask_all(
        self, ask: Callable[[FrontEndSession], Awaitable[None]], seconds: float | None = None
    ) -> None:
        """Ask all front ends at once, and leave out those that don't answer in time."""

        async def ask_in_time(peer: FrontEndSession) -> None:
            patience = ANSWER_SECONDS if seconds is None else seconds
            with contextlib.suppress(TrioserveError), trio.move_on_after(patience):
                await ask(peer)

        async with trio.open_nursery() as nursery:
            for peer in self._sessions:
                nursery.start_soon(ask_in_time, peer)
