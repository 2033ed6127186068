"""A whole server in one task: the engine, the HTTP application over it and the sockets.

::

    async with trio.open_nursery() as nursery:
        urls = await nursery.start(trioserve.serve, config)

Setting ``shutdown`` lets the server drain. Cancelling that nursery ends it at once, but properly:
streams get a last event, for which there is a moment. No signal handler is installed here: that is
the command line's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from trioserve import http
from trioserve._util.exception_groups import sole_exception
from trioserve.config import ServerConfig
from trioserve.engine.nursery import open_engine
from trioserve.engine.request_engine import RequestEngine
from trioserve.http.server.listeners import OpenListeners, check_address
from trioserve.observability.metrics import measure_loop_lag
from trioserve.protocol import wire
from trioserve.protocol.errors import ShuttingDown
from trioserve.workers.life import OnProgress

if TYPE_CHECKING:
    from trioserve.http.api.app import App


async def serve(
    config: ServerConfig,
    *,
    shutdown: trio.Event | None = None,
    on_progress: OnProgress | None = None,
    mock: wire.MockSteps | None = None,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> int:
    """Load the model, listen, and serve until cancelled or drained.

    Requests that still run when this is cancelled, or when ``shutdown_timeout`` is over, end with
    :exc:`~trioserve.protocol.errors.ShuttingDown`. For as long as that takes to reach the clients,
    at most a second or two, this goes on; nothing else does.

    Args:
        config: the engine's and the server's options.
        shutdown: once set, nothing new is admitted, what runs gets ``shutdown_timeout`` seconds to
            finish, and the function returns.
        on_progress: called while the model is loaded.
        mock: serve a worker that computes nothing, and takes that long for a step: for measuring.
        task_status: is given the URLs that the server listens on, once it does.

    Returns:
        how many requests ``shutdown_timeout`` cut off.

    Raises:
        ModelLoadError: the model can't be loaded.
        TrioserveError: the address can't be listened on.
        EngineError: the engine failed.
    """
    # Loading takes a while: an address in use should be told before it.
    await check_address(config)
    if config.api_server_count > 1:
        from trioserve.front_ends.processes.serving import serve_with_front_ends

        return await serve_with_front_ends(
            config,
            shutdown=trio.Event() if shutdown is None else shutdown,
            on_progress=on_progress,
            mock=mock,
            task_status=task_status,
        )
    async with open_engine(
        config.engine, on_progress=on_progress, mock=mock, while_loading=http.load
    ) as engine:
        if config.served_model_name:
            engine.metrics.model_name = config.served_model_name[0]
        return await serve_engine(
            engine,
            http.create_app(engine, config),
            config,
            shutdown=shutdown,
            task_status=task_status,
        )


async def serve_engine(
    engine: RequestEngine,
    app: App,
    config: ServerConfig,
    *,
    listening: OpenListeners | None = None,
    shutdown: trio.Event | None = None,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> int:
    """Serve ``engine``, which is open, until cancelled or drained.

    Args:
        engine: what ``app`` serves.
        app: the application.
        config: where to listen, and the limits.
        listening: what to listen on (default: what ``config`` says).
        shutdown: as for :func:`serve`.
        task_status: is given the URLs that are listened on.

    Returns:
        how many requests ``shutdown_timeout`` cut off.

    Raises:
        TrioserveError: the address can't be listened on.
    """
    failure: BaseException | None = None
    num_cut = 0
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(measure_loop_lag, engine.metrics.loop_lag)
            num_cut = await http.serve_app(
                app,
                config,
                listening=listening,
                shutdown=shutdown,
                on_drain=engine.drain,
                on_cut=lambda: engine.abort_all(ShuttingDown("the server is shutting down")),
                watch_connections=engine.metrics.watch_connections,
                task_status=task_status,
            )
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        failure = sole_exception(group)
    if failure is not None:
        raise failure
    return num_cut
