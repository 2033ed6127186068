"""A whole router in one task: its followers of feeds, its application and the sockets."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from trioserve._util.exception_groups import sole_exception
from trioserve.config.router import RouterConfig
from trioserve.http.router.app import RouterApp
from trioserve.http.router.follow import Follower
from trioserve.http.router.metrics import RouterMetrics
from trioserve.http.router.upstream import Upstream
from trioserve.http.server.server import serve_app
from trioserve.load.remote import Remote


async def serve_router(
    config: RouterConfig,
    servers: Sequence[tuple[Upstream, Remote]],
    *,
    shutdown: trio.Event | None = None,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> int:
    """Route until cancelled or drained.

    Args:
        config: The router's options.
        servers: The servers, each with the connection by which its feed is read.
        shutdown: Once set, nothing new is forwarded, and the function returns when all requests
            have ended, or after ``shutdown_timeout`` seconds.
        task_status: Is given the URLs that the router listens on.

    Returns:
        The number of requests that ``shutdown_timeout`` cut off.

    Raises:
        TrioserveError: The address can't be listened on.
    """
    metrics = RouterMetrics()
    upstreams = [upstream for upstream, _ in servers]
    metrics.watch(upstreams)
    app = RouterApp(config, upstreams, metrics)
    failure: BaseException | None = None
    num_cut = 0
    try:
        async with trio.open_nursery() as nursery:
            for upstream, remote in servers:
                follower = Follower(upstream, remote, config.upstream_timeout, metrics)
                nursery.start_soon(follower.run)
            num_cut = await serve_app(
                app,
                config.server,
                shutdown=shutdown,
                on_drain=app.drain,
                on_cut=app.cut,
                task_status=task_status,
            )
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        failure = sole_exception(group)
    finally:
        for upstream in upstreams:
            await upstream.connections.aclose()
    if failure is not None:
        raise failure
    return num_cut
