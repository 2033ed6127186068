"""Servers over fake engines on loopback, and a router in front of them, in one program."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import attrs
import httpx
import trio

from tests.support.http_stub import http_client, server_config
from trioserve.config.router import RouterConfig
from trioserve.engine.engine import Engine
from trioserve.http import create_app
from trioserve.http.router.serving import serve_router
from trioserve.http.router.upstream import Upstream, open_upstream
from trioserve.http.server.server import serve_app
from trioserve.load.connect import Address, parse_url
from trioserve.load.remote import Remote
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import open_fake_engine

ADMIN_KEY = "the-admin-key"


@attrs.define(eq=False)
class RoutedServer:
    """A server that a test can kill, and start again at the same port."""

    nursery: trio.Nursery
    make_worker: Callable[[], FakeWorker]
    options: dict[str, Any]
    port: int = 0
    engine: Engine = attrs.field(init=False)
    address: Address = attrs.field(init=False)
    life: trio.CancelScope = attrs.field(init=False)
    ended: trio.Event = attrs.field(init=False)
    shutdown: trio.Event = attrs.field(init=False)

    async def start(self) -> None:
        self.ended, self.shutdown = trio.Event(), trio.Event()
        url: str = await self.nursery.start(self._run)
        self.address = parse_url(url)
        self.port = self.address.port

    async def kill(self) -> None:
        self.life.cancel()
        await self.ended.wait()

    async def _run(self, task_status: trio.TaskStatus[str]) -> None:
        http_options = {name: self.options[name] for name in ("api_key",) if name in self.options}
        config = server_config(port=self.port, admin_api_key=[ADMIN_KEY], **http_options)
        options = {name: each for name, each in self.options.items() if name not in http_options}
        with trio.CancelScope() as self.life:
            async with open_fake_engine(self.make_worker, **options) as self.engine:
                async with trio.open_nursery() as nursery:
                    app = create_app(self.engine, config)

                    async def serve(task_status: trio.TaskStatus[list[str]]) -> None:
                        await serve_app(
                            app,
                            config,
                            shutdown=self.shutdown,
                            on_drain=self.engine.drain,
                            task_status=task_status,
                        )
                        nursery.cancel_scope.cancel()

                    (url,) = await nursery.start(serve)
                    task_status.started(url)
        self.ended.set()


@attrs.define(eq=False)
class Routed:
    """Some servers, and the router in front of them."""

    servers: list[RoutedServer]
    upstreams: list[Upstream]
    url: str
    shutdown: trio.Event
    num_cut: list[int]

    def client(self, **options: Any) -> httpx.AsyncClient:
        return http_client(self.url, **options)

    def served(self) -> list[int]:
        """Return how many requests each server has finished."""
        return [_finished(each.engine) for each in self.servers]

    async def wait_up(self, *expected: bool) -> None:
        """Wait until servers are in or out as ``expected``; all are in by default."""
        wanted = list(expected) or [True] * len(self.upstreams)
        with trio.fail_after(30):
            while [each.is_up for each in self.upstreams] != wanted:
                await trio.sleep(0.005)

    async def wait_followed(self) -> None:
        """Wait until the router knows all pages of all caches."""
        with trio.fail_after(30):
            for server, upstream in zip(self.servers, self.upstreams, strict=True):
                while pages_of(server) != {
                    worker: len(pages) for worker, pages in upstream.copied.pages.items() if pages
                }:
                    await trio.sleep(0.005)


def pages_of(server: RoutedServer) -> dict[int, int]:
    """Return the number of cached pages of each worker that has some."""
    numbers = {
        each.index: each.core.memory.prefix.num_nodes
        for each in server.engine.schedulers
        if each.core is not None
    }
    return {worker: number for worker, number in numbers.items() if number}


def _finished(engine: Engine) -> int:
    return int(
        sum(
            sample.value
            for metric in engine.metrics.registry.collect()
            for sample in metric.samples
            if sample.name.endswith("request_success_total")
        )
    )


@contextlib.asynccontextmanager
async def open_routed(
    count: int = 2,
    make_worker: Callable[[], FakeWorker] = FakeWorker,
    *,
    policy: str = "predicted",
    keys: Sequence[str] = (),
    up: Sequence[bool] = (),
    router_options: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[Routed]:
    """Open servers and a router for the block; it begins when servers are in or out as in ``up``.

    ``keys`` has the admin key for each of them.
    """
    shutdown, num_cut = trio.Event(), [0]
    async with trio.open_nursery() as nursery:
        servers = [RoutedServer(nursery, make_worker, options) for _ in range(count)]
        for each in servers:
            await each.start()
        server = server_config(**(router_options or {}))
        engine = attrs.evolve(server.engine, routing_policy=policy)
        config = RouterConfig(
            server=attrs.evolve(server, engine=engine),
            urls=tuple(each.address.url for each in servers),
            upstream_timeout=3.0,
        )
        upstreams = [open_upstream(each.address, None) for each in servers]
        pairs = [
            (each, _remote(each.address, key))
            for each, key in zip(upstreams, keys or [ADMIN_KEY] * count, strict=True)
        ]

        async def run(task_status: trio.TaskStatus[list[str]]) -> None:
            num_cut[0] = await serve_router(
                config, pairs, shutdown=shutdown, task_status=task_status
            )

        (url,) = await nursery.start(run)
        routed = Routed(servers, upstreams, url, shutdown, num_cut)
        await routed.wait_up(*up)
        yield routed
        nursery.cancel_scope.cancel()


def _remote(address: Address, key: str) -> Remote:
    return Remote(
        connect=address.connect(),
        host=address.authority,
        url=address.url,
        headers={"Authorization": f"Bearer {key}"},
    )
