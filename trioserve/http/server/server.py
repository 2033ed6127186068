"""Server of an ASGI application on our own sockets, with hypercorn's protocols underneath.

It fixes four problems of hypercorn's own loop: a connection can't end the server, a stalled client
can't delay the shutdown, an address in use is reported in one line, and no signal handler is
installed. Nothing of hypercorn is patched.

A shutdown has three phases; cancelling the server skips to the last. First, running requests go on,
and new ones are still accepted, to be refused with 503. Second, when ``shutdown_timeout`` is over,
the application ends each remaining request with an error. Third, accepting stops, and answers
already written have :data:`FINAL_GRACE` seconds to leave.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sized

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.trio.lifespan import Lifespan
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import (
    ASGIFramework,
    ASGIReceiveCallable,
    ASGIReceiveEvent,
    ASGISendCallable,
    Scope,
)
from hypercorn.utils import LifespanFailureError, LifespanTimeoutError

from trioserve.config import ServerConfig
from trioserve.http.server.connection import Connection
from trioserve.http.server.connections import (
    BoundedListener,
    Connections,
    FallbackListener,
    connection_limit,
)
from trioserve.http.server.listeners import OpenListeners, open_listening, removing_socket_file
from trioserve.http.server.settings import ServerSettings, server_settings
from trioserve.http.server.unsent import UnsentBudget
from trioserve.protocol.errors import TrioserveError

FINAL_GRACE = 2.0
"""Seconds for the last answers and events to leave."""
CANCELLED_GRACE = 1.0
"""Seconds for them to leave after the server was cancelled."""


async def serve_app(
    app: ASGIFramework,
    config: ServerConfig,
    *,
    listening: OpenListeners | None = None,
    shutdown: trio.Event | None = None,
    on_drain: Callable[[], None] = lambda: None,
    on_cut: Callable[[], None] = lambda: None,
    watch_connections: Callable[[Sized], None] = lambda _: None,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> int:
    """Listen and serve until cancelled, or until ``shutdown`` is set and everything has ended.

    After a cancellation it takes up to ``CANCELLED_GRACE`` seconds more, in which streams get their
    last event; if all clients read, it takes none.

    Args:
        app: the application.
        config: addresses and limits.
        listening: listeners to use instead of opening some; they are closed at the end.
        shutdown: once set, the requests that run get ``shutdown_timeout`` seconds to finish.
        on_drain: called at that moment, to refuse new requests.
        on_cut: called when their time is over, to end the remaining requests.
        watch_connections: gets the open connections, to count them at any time.
        task_status: gets the URLs listened on (the real port where 0 was asked for).

    Returns:
        the number of requests that ``shutdown_timeout`` cut off.

    Raises:
        TrioserveError: the address can't be listened on, or the application doesn't start.
    """
    if shutdown is None:
        shutdown = trio.Event()
    with contextlib.ExitStack() as stack:
        if listening is None:
            listening = await open_listening(config)
            stack.enter_context(removing_socket_file(config))
        stack.callback(listening.close)
        settings = server_settings(config, listening.tls)
        try:
            async with trio.open_nursery() as nursery:
                lifespan = Lifespan(ASGIWrapper(app), settings, {})
                await nursery.start(lifespan.handle_lifespan)
                await lifespan.wait_for_startup()
                server = _Server(app, config, settings, listening)
                watch_connections(server.connections)
                task_status.started(listening.urls)
                num_cut = await server.run(shutdown, on_drain, on_cut)
                await lifespan.wait_for_shutdown()
                nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            failures = group.subgroup((LifespanFailureError, LifespanTimeoutError))
            if failures is None:
                raise
            raise TrioserveError(f"the application failed: {_first_leaf(failures)}") from group
    return num_cut


class _Requests:
    """The application, and the running requests with complete bodies."""

    def __init__(self, app: ASGIFramework) -> None:
        self._app = app
        self._ends: dict[trio.Event, None] = {}

    async def __call__(
        self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable
    ) -> None:
        ended = trio.Event()

        async def noting_receive() -> ASGIReceiveEvent:
            message = await receive()
            if message["type"] == "http.request" and not message["more_body"]:
                self._ends[ended] = None
            return message

        try:
            await self._app(scope, noting_receive, send)
        finally:
            self._ends.pop(ended, None)
            ended.set()

    def open(self) -> list[trio.Event]:
        """Events by request, each set when its request has ended. A request still being received
        isn't among them, because it would be refused.
        """
        return list(self._ends)


class _Server:
    """One run of a server: its connections, from the first accepted to the last closed."""

    def __init__(
        self,
        app: ASGIFramework,
        config: ServerConfig,
        settings: ServerSettings,
        listening: OpenListeners,
    ) -> None:
        self._requests = _Requests(app)
        self._app = ASGIWrapper(self._requests)
        self._config = config
        self._settings = settings
        self._listening = listening
        self._context = WorkerContext(None)
        self.connections = Connections(connection_limit())
        self._budget = UnsentBudget(settings.max_unsent_bytes)
        self._patience = trio.CancelScope()
        """Cancel scope around every wait that a cancelled server gives up."""
        self._num_cut = 0
        self._interrupt: BaseException | None = None

    async def run(
        self, shutdown: trio.Event, on_drain: Callable[[], None], on_cut: Callable[[], None]
    ) -> int:
        """Accept and serve; drain once ``shutdown`` is set. Return how many requests were cut."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._notice_cancellation)
                # The server has a task of its own. A KeyboardInterrupt that trio raises in this
                # task reaches it as a cancellation.
                nursery.start_soon(self._serve_shielded, nursery, shutdown, on_drain, on_cut)
        finally:
            self.connections.close()
        if self._interrupt is not None:
            raise self._interrupt
        return self._num_cut

    @trio.lowlevel.enable_ki_protection
    async def _serve_shielded(
        self,
        nursery: trio.Nursery,
        shutdown: trio.Event,
        on_drain: Callable[[], None],
        on_cut: Callable[[], None],
    ) -> None:
        # The end takes a bounded time of its own, even if the server was cancelled.
        with trio.CancelScope(shield=True):
            self._num_cut = await self._serve(shutdown, on_drain, on_cut)
        nursery.cancel_scope.cancel()

    @trio.lowlevel.enable_ki_protection
    async def _notice_cancellation(self) -> None:
        try:
            await trio.sleep_forever()
        finally:
            self._patience.cancel()

    async def _serve(
        self, shutdown: trio.Event, on_drain: Callable[[], None], on_cut: Callable[[], None]
    ) -> int:
        async with trio.open_nursery() as background:
            background.start_soon(self.connections.watch_hangups)
            async with trio.open_nursery() as handlers:
                try:
                    async with trio.open_nursery() as accepting:
                        accepting.start_soon(self._accept, handlers)
                        num_cut = await self._drain_after(shutdown, on_drain)
                        on_cut()
                        accepting.cancel_scope.cancel()
                    await self._close_connections()
                finally:
                    # Sends are shielded from cancellation, but not from a closed socket.
                    self.connections.abort_all()
                    handlers.cancel_scope.cancel()
            background.cancel_scope.cancel()
        return num_cut

    async def _accept(self, handlers: trio.Nursery) -> None:
        own, others = self._listening.listeners, self._listening.others
        listeners = [
            *(BoundedListener(listener, self.connections) for listener in own),
            *(FallbackListener(listener, self.connections) for listener in others),
        ]
        await trio.serve_listeners(self._serve_connection, listeners, handler_nursery=handlers)

    async def _drain_after(self, shutdown: trio.Event, on_drain: Callable[[], None]) -> int:
        """Block until ``shutdown`` is set and the running requests have ended; return early if
        cancelled.

        Later requests are refused and not waited for, so clients can't delay the end.
        """
        running: list[trio.Event] = []
        with self._patience:
            await shutdown.wait()
            on_drain()
            running = self._requests.open()
            with trio.move_on_after(self._config.shutdown_timeout):
                for ended in running:
                    await ended.wait()
        on_drain()
        return sum(not ended.is_set() for ended in running)

    async def _close_connections(self) -> None:
        """Close idle connections now, and the others when their last answer has left."""
        await self._context.terminated.set()
        self.connections.close_idle()
        cancelled = self._patience.cancel_called
        with trio.move_on_after(CANCELLED_GRACE if cancelled else FINAL_GRACE):
            await self.connections.wait_none()

    async def _serve_connection(self, stream: trio.SocketStream) -> None:
        connection = Connection(
            *(self._app, self._settings, self._context, stream, self.connections, self._budget)
        )
        try:
            await connection.run()
        except* KeyboardInterrupt as interrupt:
            # Trio raises it in any task that runs. The others are ended first, and properly.
            self._interrupt = interrupt
            self._patience.cancel()


def _first_leaf(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
