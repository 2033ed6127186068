"""The prefix caches of all workers as one feed: a snapshot, and what changes after it.

A reader gets batches of changes (:class:`CacheChanges`). The first ones hold a snapshot, taken in
slices so that a large cache doesn't hold up the engine. A slice is true at the moment when it is
taken, and the events before it come first. So a reader that applies everything in order has exactly
the caches' pages once the snapshot is complete.

A reader that is too slow loses its events and gets a new snapshot. It never holds up the engine,
and never has more than :data:`MAX_EVENTS` events waiting.
"""

from __future__ import annotations

import contextlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import attrs
import msgspec
import trio

from trioserve._util.feed import Feed
from trioserve.engine.routing.load_report import LoadReport, load_report
from trioserve.protocol.errors import WatcherLimit
from trioserve.scheduler.cache_events import CacheEvent
from trioserve.scheduler.iterations import Iteration
from trioserve.scheduler.prefix_tree import Node
from trioserve.scheduler.scheduler import Scheduler

MAX_EVENTS = 10_000
"""Events that wait for one reader; with more, it gets a new snapshot instead."""
MAX_READERS = 32
"""Readers of snapshots at a time."""
SLICE = 500
"""Pages in one slice of a snapshot. Hashing them takes a few milliseconds."""
HEARTBEAT = 1.0
"""Seconds without changes after which a reader gets an empty batch."""

T = TypeVar("T")


class CachedPages(msgspec.Struct, frozen=True, kw_only=True):
    """A slice of a snapshot: hashes of cached pages, as 64-bit integers, little-endian."""

    worker: int
    """Number of the worker whose cache has them."""
    device: bytes
    """Hashes of pages in the worker's memory."""
    host: bytes
    """Hashes of pages in the host's memory."""


class CacheChanges(msgspec.Struct, frozen=True, kw_only=True):
    """The changes since the batch before, to be applied in the order of the fields."""

    batch: int
    """Number of the batch; it counts up by one for each reader."""
    snapshot: bool
    """True if a snapshot begins here: forget all pages."""
    number: int
    """Number of the last event so far. Without events it is that of the batch before."""
    events: list[CacheEvent]
    """Events, in the order of their numbers."""
    pages: list[CachedPages]
    """Slices of the snapshot."""
    complete: bool
    """True if no slice is left to come."""
    loads: list[LoadReport]
    """The load of each worker now; the pages of others are gone."""


@attrs.define(eq=False)
class _Relay(Generic[T]):
    """A reader of one scheduler's feed that gives its records to ``merged``."""

    merged: Feed[T]
    note: Callable[[T], T]

    def put(self, record: T) -> None:
        self.merged.publish(self.note(record))

    def end(self, error: Exception) -> None:
        self.merged.close(error)


@attrs.define(eq=False)
class _Merged(Generic[T]):
    """One feed of the records of all schedulers, of those that are added later, too."""

    _schedulers: Callable[[], Iterable[Scheduler]]
    _feed_of: Callable[[Scheduler], Feed[T]]
    _note: Callable[[Scheduler, T], T]
    feed: Feed[T] = attrs.field(init=False)
    _open: contextlib.ExitStack = attrs.field(init=False, factory=contextlib.ExitStack)

    def __attrs_post_init__(self) -> None:
        self.feed = Feed(on_wanted=self._on_wanted, on_unwanted=self._on_unwanted)

    def _on_wanted(self) -> None:
        for each in self._schedulers():
            self._read(each)

    def _on_unwanted(self) -> None:
        self._open.close()

    def add(self, scheduler: Scheduler) -> None:
        if self.feed.is_wanted:
            self._read(scheduler)

    def _read(self, scheduler: Scheduler) -> None:
        relay = _Relay(self.feed, lambda record: self._note(scheduler, record))
        self._open.enter_context(self._feed_of(scheduler).read_by(relay))


class CacheFeed:
    """The changes of all prefix caches of an engine, with one sequence of numbers.

    Args:
        schedulers: Returns the schedulers whose workers serve, or will again.
    """

    def __init__(self, schedulers: Callable[[], Iterable[Scheduler]]) -> None:
        self._schedulers = schedulers
        self.number = 0
        """Number of the last event."""
        self._events: _Merged[CacheEvent] = _Merged(
            schedulers, lambda each: each.feeds.cache.feed, self._numbered
        )
        self._steps: _Merged[Iteration] = _Merged(
            schedulers, lambda each: each.feeds.iterations.feed, lambda _, step: step
        )
        self._num_readers = 0

    @property
    def events(self) -> Feed[CacheEvent]:
        """The events of all caches, numbered."""
        return self._events.feed

    def add(self, scheduler: Scheduler) -> None:
        """Include the cache of one more worker."""
        self._events.add(scheduler)
        self._steps.add(scheduler)

    @contextlib.contextmanager
    def reader(self, max_events: int = MAX_EVENTS) -> Iterator[CacheReader]:
        """Return a reader for the block, of a snapshot and the changes after it.

        Raises:
            WatcherLimit: :data:`MAX_READERS` are open already.
        """
        if self._num_readers == MAX_READERS:
            raise WatcherLimit(f"{MAX_READERS} read the cache's feed already; that is the limit")
        reader = CacheReader(self, max_events)
        self._num_readers += 1
        try:
            with self.events.read_by(reader), self._steps.feed.read_by(_Waker(reader)):
                yield reader
        finally:
            self._num_readers -= 1

    def nodes(self) -> deque[tuple[Scheduler, Node]]:
        """Return all pages of the caches."""
        return deque(
            (each, node)
            for each in self._schedulers()
            if each.core is not None
            for node in each.core.memory.prefix.nodes()
        )

    def loads(self) -> list[LoadReport]:
        """Return the load of each worker."""
        return [load_report(each) for each in self._schedulers()]

    def _numbered(self, scheduler: Scheduler, event: CacheEvent) -> CacheEvent:
        self.number += 1
        return msgspec.structs.replace(event, number=self.number, worker=scheduler.index)


@attrs.define(eq=False)
class CacheReader:
    """One reader of a :class:`CacheFeed`. One task takes the batches."""

    _feed: CacheFeed
    _max_events: int
    _events: list[CacheEvent] = attrs.field(init=False, factory=list)
    _left: deque[tuple[Scheduler, Node]] = attrs.field(init=False, factory=deque)
    """Pages of the snapshot that weren't told yet."""
    _begins: bool = attrs.field(init=False, default=True)
    """True if the next batch begins a snapshot."""
    _num_batches: int = attrs.field(init=False, default=0)
    _error: Exception | None = attrs.field(init=False, default=None)
    _there: trio.Event = attrs.field(init=False, factory=trio.Event)

    def __attrs_post_init__(self) -> None:
        self._there.set()

    def put(self, event: CacheEvent) -> None:
        """Take an event. If there is no room for it, a new snapshot replaces all that wait."""
        if len(self._events) == self._max_events:
            self._begins = True
            self._events.clear()
        if not self._begins:
            self._events.append(event)
        self.wake()

    def end(self, error: Exception) -> None:
        """Note that no more events come, because of ``error``."""
        self._error = error
        self.wake()

    def wake(self) -> None:
        """Have the reader take a batch, because something has changed."""
        self._there.set()

    async def take(self) -> CacheChanges:
        """Return all changes since the last call, or block until there are some.

        Raises:
            EngineError: The engine is closed.
        """
        await trio.lowlevel.checkpoint()
        with trio.move_on_after(HEARTBEAT):
            await self._there.wait()
        if self._error is not None:
            raise self._error
        self._there = trio.Event()
        return self.take_now()

    def take_now(self) -> CacheChanges:
        """Return all changes since the last call, and the next slice of a snapshot; never block."""
        begins, self._begins = self._begins, False
        if begins:
            self._left = self._feed.nodes()
        events, self._events = self._events, []
        self._num_batches += 1
        changes = CacheChanges(
            batch=self._num_batches,
            snapshot=begins,
            number=self._feed.number,
            events=events,
            pages=self._next_pages(),
            complete=not self._left,
            loads=self._feed.loads(),
        )
        if self._left:
            self.wake()
        return changes

    def _next_pages(self) -> list[CachedPages]:
        """Return the next slice of the snapshot, without pages that are gone."""
        found: dict[int, tuple[array[int], array[int]]] = {}
        for _ in range(min(SLICE, len(self._left))):
            scheduler, node = self._left.popleft()
            core = scheduler.core
            if core is None or not core.memory.prefix.has(node):
                continue
            hash = scheduler.feeds.cache.hash_of(node)
            if hash is not None:
                levels = found.setdefault(scheduler.index, (array("Q"), array("Q")))
                levels[core.memory.pool.is_on_host(node.page)].append(hash)
        return [
            CachedPages(worker=worker, device=device.tobytes(), host=host.tobytes())
            for worker, (device, host) in found.items()
        ]


@attrs.frozen(eq=False)
class _Waker:
    """A reader of steps that only wakes ``reader``, because loads have changed."""

    reader: CacheReader

    def put(self, _: Any) -> None:
        self.reader.wake()

    def end(self, error: Exception) -> None:
        """Leave the end to the feed of events."""
