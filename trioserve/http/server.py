"""Serving an ASGI application on sockets of our own, with hypercorn's protocols underneath.

What hypercorn's own loop leaves open is closed here: a connection can't end the server, a stalled
client can't hold up the shutdown, and an address in use is one line. No signal handler is
installed, and nothing of hypercorn is patched.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.logging import Logger
from hypercorn.trio.lifespan import Lifespan
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ASGIFramework
from hypercorn.utils import LifespanFailureError, LifespanTimeoutError

from trioserve.config import ServerConfig
from trioserve.errors import TrioserveError
from trioserve.http.connection import Connection, Connections
from trioserve.http.listeners import Listening, open_listening, removing_socket_file
from trioserve.http.protocol import ServerSettings

__all__ = ["serve_app"]


class _HypercornLog(Logger):
    """What hypercorn has to say, in our log. Requests are logged by the application."""

    def __init__(self, config: object) -> None:
        self.access_logger = None
        self.error_logger = logging.getLogger("trioserve.http")


def _settings(config: ServerConfig) -> ServerSettings:
    settings = ServerSettings()
    settings.logger_class = _HypercornLog
    settings.send_timeout = config.send_timeout
    settings.include_server_header = False
    settings.keep_alive_timeout = 75  # More than the 60 s after which proxies drop an idle one.
    settings.keep_alive_max_requests = 100_000
    settings.h11_max_incomplete_size = 1 << 16
    settings.h2_max_concurrent_streams = 128
    settings.h2_max_header_list_size = 1 << 16
    settings.h2_max_inbound_frame_size = 1 << 14
    return settings


async def serve_app(
    app: ASGIFramework,
    config: ServerConfig,
    *,
    shutdown: trio.Event | None = None,
    on_drain: Callable[[], None] | None = None,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Listen and serve until cancelled, or until ``shutdown`` is set and everything has ended.

    Args:
        app: the application.
        config: where to listen, and the limits.
        shutdown: once set, no connection is accepted, those that serve nothing are closed, and the
            others get ``shutdown_timeout`` seconds.
        on_drain: called at that moment, to refuse what still comes on open connections.
        task_status: is given the URLs listened on (the real port where 0 was asked for).

    Raises:
        TrioserveError: the address can't be listened on, or the application doesn't start.
    """
    if shutdown is None:
        shutdown = trio.Event()
    listening = await open_listening(config)
    settings = _settings(config)
    with removing_socket_file(config):
        try:
            async with trio.open_nursery() as nursery:
                lifespan = Lifespan(ASGIWrapper(app), settings, {})
                await nursery.start(lifespan.handle_lifespan)
                await lifespan.wait_for_startup()
                server = _Server(app, config, settings, listening)
                task_status.started(listening.urls)
                await server.run(shutdown, on_drain)
                await lifespan.wait_for_shutdown()
                nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            failures = group.subgroup((LifespanFailureError, LifespanTimeoutError))
            if failures is None:
                raise
            raise TrioserveError(f"the application failed: {_first_leaf(failures)}") from group
        finally:
            listening.close()


class _Server:
    """One run of a server: its connections, from the first accepted to the last closed."""

    def __init__(
        self,
        app: ASGIFramework,
        config: ServerConfig,
        settings: ServerSettings,
        listening: Listening,
    ) -> None:
        self._app = ASGIWrapper(app)
        self._config = config
        self._settings = settings
        self._listening = listening
        self._context = WorkerContext(None)
        self._connections = Connections()

    async def run(self, shutdown: trio.Event, on_drain: Callable[[], None] | None) -> None:
        """Accept and serve; once ``shutdown`` is set, drain and return."""
        try:
            async with trio.open_nursery() as background:
                background.start_soon(self._connections.watch_hangups)
                async with trio.open_nursery() as nursery:
                    try:
                        await self._accept_until(shutdown, nursery)
                        if on_drain is not None:
                            on_drain()
                        await self._context.terminated.set()
                        with trio.move_on_after(self._config.shutdown_timeout):
                            await self._connections.wait_none()
                    finally:
                        # Sends are shielded from cancellation, but not from a closed socket.
                        self._connections.abort_all()
                        nursery.cancel_scope.cancel()
                background.cancel_scope.cancel()
        finally:
            self._connections.close()

    async def _accept_until(self, shutdown: trio.Event, handlers: trio.Nursery) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                functools.partial(
                    trio.serve_listeners,
                    self._serve_connection,
                    self._listening.listeners,
                    handler_nursery=handlers,
                )
            )
            await shutdown.wait()
            nursery.cancel_scope.cancel()

    async def _serve_connection(self, stream: trio.SocketStream) -> None:
        connection = Connection(self._app, self._settings, self._context, stream, self._connections)
        await connection.run()


def _first_leaf(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
