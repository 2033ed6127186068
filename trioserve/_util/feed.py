"""Feeds: streams of records for any number of readers, bounded for each and free without any.

A writer checks :attr:`Feed.is_wanted` first, and makes no record otherwise. Writing never blocks: a
reader that lags loses the oldest records, and is told how many.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

import attrs
import trio

T = TypeVar("T")
_Record = TypeVar("_Record", contravariant=True)

DEFAULT_MAX_RECORDS = 1000
"""Records that wait for one reader, unless it asks for another number."""


class Reader(Protocol[_Record]):
    """A receiver of a feed's records."""

    def put(self, record: _Record) -> None:
        """Take ``record``. Must not block."""

    def end(self, error: Exception) -> None:
        """Note that no more records come, because of ``error``."""


@attrs.define(eq=False)
class Subscription(Generic[T]):
    """The records of one reader, in order: an async iterator. One task reads it."""

    _records: deque[T]
    num_dropped: int = attrs.field(init=False, default=0)
    """Number of records that this reader has lost because it was too slow."""
    _error: Exception | None = attrs.field(init=False, default=None)
    _there: trio.Event = attrs.field(init=False, factory=trio.Event)

    def put(self, record: T) -> None:
        """Add ``record``; if there is no room, the oldest one is dropped."""
        self.num_dropped += len(self._records) == self._records.maxlen
        self._records.append(record)
        self._there.set()

    def end(self, error: Exception) -> None:
        """Note that no more records come: after the last one the reader gets ``error``."""
        self._error = error
        self._there.set()

    def take(self) -> list[T]:
        """Return all records that wait, without waiting for more."""
        records = list(self._records)
        self._records.clear()
        return records

    def check_open(self) -> None:
        """Raise the error that the feed has ended with, if it has."""
        if self._error is not None:
            raise self._error

    async def receive(self) -> T:
        """Return the oldest record, or block until there is one. Cancelling it loses nothing.

        Raises:
            EngineError: The engine is closed, and all records have been read.
        """
        await trio.lowlevel.checkpoint()
        while not self._records:
            if self._error is not None:
                raise self._error
            self._there = trio.Event()
            await self._there.wait()
        return self._records.popleft()

    def __aiter__(self) -> Subscription[T]:
        return self

    async def __anext__(self) -> T:
        return await self.receive()


class Tail(Generic[T]):
    """The newest records of a feed, from the first call of :meth:`take` until the feed ends."""

    def __init__(
        self, subscribe: Callable[[], contextlib.AbstractContextManager[Subscription[T]]]
    ) -> None:
        self._subscribe = subscribe
        self._scope = contextlib.ExitStack()
        self._subscription: Subscription[T] | None = None

    def take(self) -> list[T]:
        """Return the records that came since the last call."""
        if self._subscription is None:
            self._subscription = self._scope.enter_context(self._subscribe())
        return self._subscription.take()


@attrs.define(eq=False)
class Feed(Generic[T]):
    """The writing side of a stream of records.

    Args:
        on_wanted: Called when the first reader comes.
        on_unwanted: Called when the last reader leaves.
    """

    on_wanted: Callable[[], None] = lambda: None
    on_unwanted: Callable[[], None] = lambda: None
    _readers: list[Reader[T]] = attrs.field(init=False, factory=list)
    _error: Exception | None = attrs.field(init=False, default=None)
    is_wanted: bool = attrs.field(init=False, default=False)
    """True while there are readers. An attribute, because every step checks it."""

    @property
    def num_readers(self) -> int:
        """Number of readers."""
        return len(self._readers)

    def publish(self, record: T) -> None:
        """Give ``record`` to every reader. Never blocks."""
        for reader in self._readers:
            reader.put(record)

    def subscribe(
        self, max_records: int = DEFAULT_MAX_RECORDS
    ) -> contextlib.AbstractContextManager[Subscription[T]]:
        """Subscribe to this feed alone: see :func:`subscribe_to`."""
        return subscribe_to([self], max_records)

    @contextlib.contextmanager
    def read_by(self, reader: Reader[T]) -> Iterator[None]:
        """Give ``reader`` every record that is published while the block lasts."""
        if self._error is not None:
            reader.end(self._error)
        if not self._readers:
            self.on_wanted()
        self._readers.append(reader)
        self.is_wanted = True
        try:
            yield
        finally:
            self._readers.remove(reader)
            self.is_wanted = bool(self._readers)
            if not self.is_wanted:
                self.on_unwanted()

    def close(self, error: Exception) -> None:
        """End the feed: readers get ``error`` after the last record. Idempotent."""
        if self._error is None:
            self._error = error
            for reader in self._readers:
                reader.end(error)


@contextlib.contextmanager
def subscribe_to(
    feeds: Iterable[Feed[T]], max_records: int = DEFAULT_MAX_RECORDS
) -> Iterator[Subscription[T]]:
    """Subscribe to the records that ``feeds`` publish during the block, in the order in which they
    come.

    Records that the reader is too slow for are lost.

    Args:
        feeds: The feeds to read.
        max_records: Most records that may wait for the reader; at least 1.
    """
    if max_records < 1:
        raise ValueError(f"max_records must be at least 1, got {max_records}")
    reader: Subscription[T] = Subscription(deque(maxlen=max_records))
    with contextlib.ExitStack() as stack:
        for feed in feeds:
            stack.enter_context(feed.read_by(reader))
        yield reader
