"""Handlers of ``/console``: the page's files, and snapshots of the engine as events."""

from __future__ import annotations

import math

import quart
import trio
from werkzeug.exceptions import NotFound

from trioserve.http.api.auth import Keys, authorization_of
from trioserve.http.api.console.files import PAGE, SECURITY_HEADERS, read_files
from trioserve.http.api.console.schemas import LiveQuery
from trioserve.http.api.server_api import TakeSnapshot
from trioserve.http.api.service import Service
from trioserve.http.api.sse import FeedBody, named_event, stream_response
from trioserve.observability.live import Hello, due_after, hello_of


class ConsoleEndpoints:
    """The handlers, over one service."""

    def __init__(self, service: Service, keys: Keys) -> None:
        self._service = service
        self._keys = keys
        self._files = read_files()

    async def console_page(self) -> quart.Response:
        """Handle ``GET /console``."""
        return self._file_response(PAGE)

    async def console_file(self, name: str) -> quart.Response:
        """Handle ``GET /console/static/<path:name>``."""
        return self._file_response(name)

    def _file_response(self, name: str) -> quart.Response:
        file = self._files.get(name)
        if file is None:
            raise NotFound
        headers = {**SECURITY_HEADERS, "Cache-Control": "no-cache", "ETag": f'"{file.etag}"'}
        if quart.request.if_none_match.contains(file.etag):
            return quart.Response(b"", status=304, headers=headers)
        return quart.Response(file.data, headers=headers, content_type=file.content_type)

    async def console_live(self) -> quart.Response:
        """Handle ``GET /console/live``: ``hello`` once, and then a ``picture`` each interval."""
        service = self._service
        query = service.read_query(LiveQuery)
        hello = hello_of(
            service.engine,
            model=service.model_names[0],
            started=service.started,
            front_ends=service.config.api_server_count,
            may_control=self._keys.may_control(authorization_of(quart.request.headers)),
        )
        feed = stream_response(_Feed(service, query, hello))
        # The body for a HEAD would never end.
        return feed if quart.request.method == "GET" else quart.Response(b"", headers=feed.headers)


class _Feed(FeedBody):
    """Stream of snapshots. One is taken when the one before has left, so a slow client gets fewer.

    It ends when the server drains, after a snapshot that says so.
    """

    def __init__(self, service: Service, query: LiveQuery, hello: Hello) -> None:
        super().__init__()
        self._service = service
        self._query = query
        self._hello: Hello | None = hello
        self._take: TakeSnapshot | None = None
        self._due = 0.0
        self._left = query.pictures or math.inf
        """Number of snapshots still to come."""

    async def __aenter__(self) -> _Feed:
        watch = self._service.server_api.watch(
            requests=self._query.requests, nodes=self._query.nodes
        )
        self._take = await self._scope.enter_async_context(watch)
        return self

    async def __anext__(self) -> bytes:
        if self._hello is not None:
            hello, self._hello = self._hello, None
            self._due = trio.current_time()
            return named_event("hello", hello)
        if self._left == 0:
            raise StopAsyncIteration
        draining = await self._wait()
        assert self._take is not None
        snapshot = await self._take()
        self._left = 0 if draining else self._left - 1
        return named_event("picture", snapshot)

    async def _wait(self) -> bool:
        """Wait until a snapshot is due; return whether it is the last one, because the server
        drains.
        """
        engine = self._service.engine
        with trio.move_on_at(self._due):
            await engine.wait_draining()
        self._due = due_after(self._due, self._query.interval)
        return engine.draining
