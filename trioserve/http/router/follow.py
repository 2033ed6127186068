"""The task that follows the feed of one server. It is the router's only source about the server.

A server whose feed breaks, is silent or ends gets no requests until its feed is back. If changes
are missing, the feed is opened again at once, and begins with a new snapshot; meanwhile the server
goes on with what is known of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import attrs
import msgspec
import trio

from trioserve.engine.cache_copy import CacheCopy, FeedGap
from trioserve.engine.cache_feed import CacheChanges
from trioserve.http.router.metrics import RouterMetrics
from trioserve.http.router.upstream import Upstream
from trioserve.load.events import Event
from trioserve.load.remote import Remote, RemoteError
from trioserve.observability.logs import get_logger

PATH = "/kv_cache_events"
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds before a feed is opened again; they double with each failure."""
_log = get_logger("trioserve.router")


class _Names(msgspec.Struct):
    """The server of a feed."""

    models: list[str]
    page_size: int


@attrs.define(eq=False)
class Follower:
    """The reader of one server's feed.

    Args:
        upstream: The server.
        remote: Its address and admin key.
        timeout: Longest silence of a feed in seconds.
        metrics: The router's metrics.
    """

    _upstream: Upstream
    _remote: Remote
    _timeout: float
    _metrics: RouterMetrics
    _pause: float = attrs.field(init=False, default=FIRST_PAUSE)

    async def run(self) -> None:
        """Follow the feed until cancelled."""
        while True:
            try:
                await self._follow()
            except FeedGap as gap:
                self._metrics.count_gap(self._upstream.url)
                _log.warning("feed has a gap", server=self._upstream.url, reason=str(gap))
                continue
            except (RemoteError, msgspec.MsgspecError) as error:
                self._lose(str(error))
            await trio.sleep(self._pause)
            self._pause = min(2 * self._pause, LONGEST_PAUSE)

    async def _follow(self) -> None:
        """Follow one connection of the feed to its end.

        Raises:
            FeedGap: Changes are missing.
            RemoteError: The server can't be reached, or has no such feed.
            msgspec.MsgspecError: The feed is of another version.
        """
        async with contextlib.AsyncExitStack() as stack:
            with self._time_limit():
                events = await stack.enter_async_context(self._remote.events(PATH))
            copied = CacheCopy()
            while True:
                with self._time_limit():
                    event = await anext(events, None)
                if event is None:
                    break
                self._take(event, copied)
        raise RemoteError(f"{self._remote.url} has ended its feed")

    def _take(self, event: Event, copied: CacheCopy) -> None:
        upstream = self._upstream
        if event.name == "server":
            names = msgspec.json.decode(event.data, type=_Names)
            upstream.models, upstream.page_size = frozenset(names.models), names.page_size
        elif event.name == "changes":
            changes = msgspec.json.decode(event.data, type=CacheChanges)
            copied.apply(changes)
            if changes.snapshot:
                self._metrics.count_snapshot(upstream.url)
            upstream.copied = copied
            upstream.note_report()
            if copied.complete and upstream.out_because:
                upstream.out_because = ""
                self._pause = FIRST_PAUSE
                _log.info("server is in", server=upstream.url, models=sorted(upstream.models))

    def _lose(self, reason: str) -> None:
        """Give the server no requests, because of ``reason``."""
        if self._upstream.out_because != reason:
            _log.warning("server is out", server=self._upstream.url, reason=reason)
        self._upstream.out_because = reason

    @contextlib.contextmanager
    def _time_limit(self) -> Iterator[None]:
        try:
            with trio.fail_after(self._timeout):
                yield
        except trio.TooSlowError as error:
            raise RemoteError(
                f"{self._remote.url} has sent nothing for {self._timeout:g} s"
            ) from error
