"""A worker of another host, as the engine has it. It keeps its place while its link is away."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

import attrs
import trio

from trioserve._util.conditions import Conditions
from trioserve.protocol import wire
from trioserve.protocol.errors import ModelLoadError, WorkerGone, WorkerLost
from trioserve.protocol.joining import Join, WorkerRole
from trioserve.workers import Link
from trioserve.workers.life import run_worker
from trioserve.workers.link import LinkTraffic
from trioserve.workers.remote.link import RemoteLink

MAX_WORKERS = 1024
"""Most workers of other hosts, and most agents that are known not to be wanted any more."""
REJOIN_TIMEOUT = 60.0
"""Seconds for a lost worker to join again, before the others go on without it."""


@attrs.define(eq=False)
class _JoinedProcess:
    """One life of a worker of another host: a :class:`~trioserve.workers.life.StartedWorker`."""

    name: str
    host: str
    link: RemoteLink

    async def greet(self) -> None:
        """Do nothing: the agent has greeted its worker process."""

    async def wait_lost(self) -> WorkerLost:
        """Block until the link has ended; return why."""
        loss = await self.link.wait_lost()
        message = f"{self.name}: {loss}"
        return WorkerLost(message, from_outside=loss.from_outside, reason=loss.reason)

    def serving(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing: dumps of tasks are of this host."""
        return contextlib.nullcontext()

    def identified(self, ready: wire.Ready) -> wire.Ready:
        """Return ``ready`` with the host, of which process ids aren't told."""
        return attrs.evolve(ready, pid=0, rank_pids=[], host=self.host)


@attrs.define(eq=False, kw_only=True)
class JoinedWorker:
    """A series of links to one agent, each with a worker process behind it.

    Args:
        id: Name of the agent's process.
        start: What each worker loads.
        start_timeout: Most seconds without progress while it loads.
        computes: The part of each request that the worker computes.
        others_serve: Returns True if the engine has another worker that serves.
        amend: Returns what the next worker loads: ``start`` with what has changed since.
    """

    id: str
    host: str
    start: wire.Start
    start_timeout: float
    computes: WorkerRole = "both"
    others_serve: Callable[[], bool] = lambda: False
    amend: Callable[[wire.Start], wire.Start] = lambda start: start
    traffic: LinkTraffic = attrs.field(init=False)
    """Measures of all links."""
    _link: RemoteLink | None = attrs.field(init=False, default=None)
    """Link that no worker has been started over."""
    _present: RemoteLink | None = attrs.field(init=False, default=None)
    """Link of the present worker."""
    _has_served: bool = attrs.field(init=False, default=False)
    _has_left: bool = attrs.field(init=False, default=False)
    """True if the agent of the last worker has ended."""
    _changes: Conditions = attrs.field(init=False, factory=Conditions)
    dismissal: str = attrs.field(init=False, default="")
    """Why the agent isn't wanted any more; empty if it is."""
    index: int | None = attrs.field(init=False, default=None)
    """Number of the engine's worker; None until it serves for the first time."""
    is_gone: bool = attrs.field(init=False, default=False)
    """True once it isn't waited for any more. If it joins again, it is a new one."""

    @traffic.default
    def _make_traffic(self) -> LinkTraffic:
        return LinkTraffic(host=self.host)

    def take(self, link: RemoteLink) -> None:
        """Start the next worker over ``link``. An older link, which may be half-open, ends."""
        for older in (self._link, self._present):
            if older is not None:
                older.end("its agent has joined again")
        link.traffic = self.traffic
        self._link = link
        self.notify()

    def notify(self) -> None:
        """Notify :meth:`wait_here` that there is a link, or another worker that serves."""
        self._changes.notify()

    async def turn_away(self, reason: str) -> None:
        """Refuse a link over which no worker was started; its agent may try again."""
        link, self._link = self._link, None
        if link is not None:
            await link.refuse(reason, final=False)

    def dismiss(self, reason: str) -> None:
        """Tell the agent, when the present worker ends, that it isn't wanted any more."""
        self.dismissal = reason

    async def wait_here(self) -> None:
        """Block until there is a link to start the next worker over.

        Raises:
            WorkerGone: Other workers serve, and there is no link after :data:`REJOIN_TIMEOUT`, or
                the agent has ended.
        """
        with trio.move_on_after(0 if self._has_left else REJOIN_TIMEOUT):
            await self._changes.wait_for(self._has_link)
        await self._changes.wait_for(lambda: self._has_link() or self.others_serve())
        if not self._has_link():
            self.is_gone = True
            raise WorkerGone(f"the worker at {self.host} has left, or didn't join again")

    def _has_link(self) -> bool:
        return self._link is not None and not self._link.ended.is_set()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[tuple[Link, wire.Ready]]:
        """Run the next worker; see :func:`~trioserve.workers.life.run_worker`."""
        async with run_worker(
            self._open_link(),
            self.amend(self.start),
            start_timeout=self.start_timeout,
            on_progress=lambda _: None,
        ) as (link, ready):
            self._has_served = True
            yield link, ready

    @contextlib.asynccontextmanager
    async def _open_link(self) -> AsyncIterator[_JoinedProcess]:
        link, self._link = self._link, None
        assert link is not None
        self._present = link
        try:
            yield _JoinedProcess(f"worker at {self.host}", self.host, link)
        except ModelLoadError as error:
            if not self._has_served:  # else the cause may be temporary
                self.dismiss(str(error))
            raise
        finally:
            with trio.CancelScope(shield=True):
                if self.dismissal:
                    await link.refuse(self.dismissal, final=True)
            self._present = None
            self._has_left = link.leaves
            link.end("the engine has let it go")


@attrs.define(eq=False)
class JoinedWorkers:
    """The workers of other hosts by their agents' names.

    Args:
        start: What each worker loads.
        start_timeout: Most seconds without progress while it loads.
        on_new: Called with each worker that is new, to start it.
    """

    _start: wire.Start
    _start_timeout: float
    on_new: Callable[[JoinedWorker], None] = lambda _: None
    joins: Conditions = attrs.field(init=False, factory=Conditions)
    """Conditions that hang on the workers that serve."""
    _workers: dict[str, JoinedWorker] = attrs.field(init=False, factory=dict)

    @property
    def schema(self) -> str:
        """Hash of the messages to and from a worker."""
        return wire.schema_hash()

    @property
    def num_serving(self) -> int:
        """Number of workers that serve, or have served and may come back."""
        return sum(each.index is not None for each in self._workers.values())

    def index_of(self, id: str) -> int | None:
        """Return the number of an agent's worker; None if it hasn't served."""
        worker = self._workers.get(id)
        return None if worker is None else worker.index

    def note_serving(self, worker: JoinedWorker, index: int) -> None:
        """Note that a worker serves, by the number of the engine's worker."""
        worker.index = index
        self.joins.notify()

    def notify(self) -> None:
        """Notify those without a link that another worker serves."""
        for each in self._workers.values():
            each.notify()

    def obstacle(self, join: Join) -> str | None:
        """Return the reason why an agent isn't wanted; None if it is."""
        worker = self._workers.get(join.id)
        if worker is not None:
            return worker.dismissal or None
        if sum(not each.dismissal for each in self._workers.values()) >= MAX_WORKERS:
            return f"the engine has {MAX_WORKERS} workers of other hosts, which is the limit"
        return None

    def take(self, join: Join, link: RemoteLink) -> None:
        """Start a worker over ``link``: a new one, or the next life of one that is known."""
        worker = self._workers.get(join.id)
        if worker is None or worker.is_gone:
            worker = JoinedWorker(
                id=join.id,
                host=join.host,
                start=self._start,
                start_timeout=self._start_timeout,
                computes=join.computes,
            )
            self._forget_old()
            self._workers[join.id] = worker
            worker.take(link)
            self.on_new(worker)
        else:
            worker.take(link)

    def _forget_old(self) -> None:
        known = [each for each in self._workers.values() if not each.is_gone]
        wanted = [each for each in known if not each.dismissal]
        dismissed = [each for each in known if each.dismissal][-MAX_WORKERS:]
        self._workers = {each.id: each for each in (*dismissed, *wanted)}

    def forget(self, worker: JoinedWorker) -> None:
        """Forget a worker that couldn't be started: if its agent joins again, it is a new one."""
        if not worker.dismissal:
            self._workers.pop(worker.id, None)
