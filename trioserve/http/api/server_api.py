"""Interface between HTTP and a whole server, which may be several processes.

An engine knows its own process only. :class:`LocalServer` is a server of one process. With several,
:class:`trioserve.front_ends.client.server_api.RemoteServer` asks the others.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import attrs

from trioserve.engine.administration import Administration
from trioserve.engine.cache_feed import CacheChanges
from trioserve.engine.local_administration import LocalAdministration
from trioserve.engine.sessions.continuation import Continuation, Generate
from trioserve.http.api.auth import Caller, Keys
from trioserve.http.api.openai.responses.store import (
    KeptResponses,
    LocalResponses,
    ResponseStore,
)
from trioserve.observability.health import health_word
from trioserve.observability.live import Snapshot, monitor_of

Permit = contextlib.AbstractContextManager[None]
TakeSnapshot = Callable[[], Awaitable[Snapshot]]
"""Function that takes a snapshot of the server."""
TakeChanges = Callable[[], Awaitable[CacheChanges]]
"""Function that takes the changes of the prefix caches since its last call, or waits for some."""


class ServerApi(Administration, ResponseStore, Protocol):
    """Interface of a server, of one process or several."""

    async def health_word(self) -> str:
        """Return one word for its health: ``ok``, ``draining``, ``no_worker`` or ``stalled``."""

    async def metrics(self) -> bytes:
        """Return all metrics in Prometheus' text format."""

    async def permit(
        self, keys: Keys, caller: Caller | None
    ) -> contextlib.AbstractContextManager[None]:
        """Return a block in which a request of ``caller`` is open; entering raises ``KeyLimit``."""

    def watch(self, *, requests: int, nodes: int) -> AbstractAsyncContextManager[TakeSnapshot]:
        """Take snapshots of the server until the block is left, as ``Monitor.watched``."""

    def read_cache(self) -> AbstractAsyncContextManager[TakeChanges]:
        """Read the prefix caches until the block is left, as ``CacheFeed.reader``."""

    def turn(self, id: str, owner: str | None, continuation: Continuation) -> Generate:
        """Return the function that generates a turn of a session of ``owner``.

        If there is no such session, this raises ``InvalidRequest``, or the first use does.
        """


@attrs.define(eq=False)
class LocalServer(LocalAdministration, LocalResponses):
    """A server that is one engine in one process."""

    responses: KeptResponses = attrs.field(init=False, factory=KeptResponses)

    async def health_word(self) -> str:
        """Return one word for its health: ``ok``, ``draining``, ``no_worker`` or ``stalled``."""
        return health_word(self._engine)

    async def metrics(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return self._engine.metrics.render()

    async def permit(
        self, keys: Keys, caller: Caller | None
    ) -> contextlib.AbstractContextManager[None]:
        """Return a block in which a request of ``caller`` is open; entering raises ``KeyLimit``."""
        return keys.counted(caller)

    @contextlib.asynccontextmanager
    async def watch(self, *, requests: int, nodes: int) -> AsyncIterator[TakeSnapshot]:
        """Take snapshots as :meth:`trioserve.observability.live.Monitor.watched`."""
        with monitor_of(self._engine).watched(requests=requests, nodes=nodes) as watcher:

            async def take() -> Snapshot:
                return watcher.take()

            yield take

    @contextlib.asynccontextmanager
    async def read_cache(self) -> AsyncIterator[TakeChanges]:
        """Read the prefix caches as :meth:`trioserve.engine.cache_feed.CacheFeed.reader`."""
        with self._engine.schedulers.cache_feed.reader() as reader:
            yield reader.take

    def turn(self, id: str, owner: str | None, continuation: Continuation) -> Generate:
        """Return the function that generates a turn of a session, or raise ``InvalidRequest``."""
        session = self._engine.sessions.find(id, owner)
        return functools.partial(session.generate, continuation=continuation)
