"""``trioserve route``: the router process, with its signals and its output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import attrs

from trioserve.cli.output import writing
from trioserve.cli.remote import address_of, authorization
from trioserve.cli.signals import SignalledProcess
from trioserve.cli.usage import UsageError
from trioserve.config.router import RouterConfig
from trioserve.http.router.serving import serve_router
from trioserve.http.router.upstream import Upstream, open_upstream
from trioserve.http.server.connections import raise_descriptor_limit
from trioserve.load.connect import tls_context
from trioserve.load.remote import Remote
from trioserve.protocol.gc_tuning import rare_collections


@attrs.define(eq=False)
class _Start:
    """The router's ``trio.TaskStatus``."""

    process: SignalledProcess
    num_servers: int
    freeze: Callable[[], None]
    """Called when the router listens, to freeze long-lived objects for the garbage collector."""

    def started(self, value: Sequence[str] = ()) -> None:
        """Print the addresses that the router listens on."""
        self.process.serving = True
        self.freeze()
        with writing():
            print(f"Routing to {self.num_servers} servers at {', '.join(value)}", flush=True)


def upstreams_of(config: RouterConfig) -> list[tuple[Upstream, Remote]]:
    """Return the servers of a router, each with the connection by which its feed is read.

    Raises:
        UsageError: A URL, the key or the file of certificates can't be used.
    """
    headers = {}
    if config.upstream_admin_api_key is not None:
        headers = authorization(config.upstream_admin_api_key)
    servers: dict[str, tuple[Upstream, Remote]] = {}
    for url in config.urls:
        address = address_of(url, instead="--upstream-admin-api-key")
        if address.url in servers:
            raise UsageError(f"{address.url} is given twice")
        file = config.upstream_ca_file
        try:
            context = tls_context(None if file is None else Path(file)) if address.tls else None
        except OSError as error:
            raise UsageError(f"--upstream-ca-file: {file} can't be used: {error}") from error
        remote = Remote(
            connect=address.connect(context),
            host=address.authority,
            url=address.url,
            headers=headers,
        )
        servers[address.url] = (open_upstream(address, context), remote)
    return list(servers.values())


async def run_router(config: RouterConfig) -> int:
    """Route until drained or ended by a signal, and return the exit code, as a server's.

    Raises:
        UsageError: A URL, the key or the file of certificates can't be used.
        TrioserveError: The address can't be used.
    """
    servers = upstreams_of(config)
    raise_descriptor_limit()
    process = SignalledProcess(config.server.shutdown_timeout)
    with rare_collections() as freeze:
        start = _Start(process, len(servers), freeze)

        async def run() -> int:
            return await serve_router(config, servers, shutdown=process.shutdown, task_status=start)

        return await process.run(run)
