"""An engine process with a fake worker in this program, and front ends that join it over TLS."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import trio

from tests.support.http_stub import connect, http_client, raw_request, read_until
from trioserve import EngineConfig, ServerConfig
from trioserve.engine.engine_worker import EngineWorker
from trioserve.engine.worker_start import start_message
from trioserve.front_ends.files import hashes_of
from trioserve.front_ends.messages import Drain
from trioserve.front_ends.processes.pool import ProcessPool
from trioserve.front_ends.remote.agent import FrontEndAgent
from trioserve.front_ends.remote.joined import JoinedFrontEnds
from trioserve.front_ends.server.engine_server import EngineServer, open_host
from trioserve.http.server.listeners import SharedListening
from trioserve.model_files import open_model
from trioserve.observability.metrics import Metrics
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import run_fake_worker
from trioserve.workers.remote.joined import JoinedWorkers
from trioserve.workers.remote.port import WorkersPort
from trioserve.workers.remote.tls import engine_tls, front_end_tls

TIMEOUT = 30.0
LINK_TIMEOUT = 1.0
PATH = "/v1/completions"
BODY = {"prompt": [3, 4, 5], "seed": 1, "ignore_eos": True}


@attrs.frozen(kw_only=True)
class EngineProcess:
    """The engine process without front ends of its own."""

    engine_server: EngineServer
    joined: JoinedFrontEnds
    config: ServerConfig
    checksum: str
    """Checksum of its model."""
    address: str
    """Address at which front ends join."""

    async def until(self, condition: Callable[[], bool]) -> None:
        """Block until ``condition`` is true."""
        with trio.fail_after(TIMEOUT):
            while not condition():
                await trio.sleep(0.005)

    async def wait_serving(self, count: int) -> None:
        """Block until so many front ends serve."""
        await self.until(lambda: len(self.engine_server.peers) == count)

    async def wait_nothing_held(self) -> None:
        """Block until no request runs or waits, then assert that nothing is held."""
        await self.until(lambda: self.engine_server.idle)
        self.engine_server.check_integrity()
        statistics = self.engine_server.statistics().scheduler
        assert statistics.num_running == statistics.num_waiting == statistics.pages_held == 0

    def drain(self) -> None:
        """Have all front ends drain, as a server that ends."""
        self.joined.drain()
        for peer in self.engine_server.peers:
            peer.tell(Drain())


@contextlib.asynccontextmanager
async def open_engine_process(
    model: Path, tls: Path, step_time: float = 0.01, **server_options: Any
) -> AsyncIterator[EngineProcess]:
    """Open an engine process with a fake worker; front ends with ``model``'s files may join."""
    options = EngineConfig(str(model), worker_link_timeout=LINK_TIMEOUT)
    config = ServerConfig(engine=options, api_server_count=2, **server_options)
    metrics = Metrics("tiny")
    joined = JoinedFrontEnds()
    port = WorkersPort(
        address="127.0.0.1:0",
        tls=engine_tls(str(tls)),
        timeout=LINK_TIMEOUT,
        checksum=open_model(model).checksum(),
        workers=JoinedWorkers(start_message(options, model), 5.0),
        front_ends=joined,
    )

    def make_worker(index: int, device: str | None = None) -> EngineWorker:
        return EngineWorker.of(
            index,
            options,
            metrics,
            lambda: run_fake_worker(FakeWorker(step_time=step_time), options),
        )

    async with open_host(config, make_worker, metrics, port=port) as engine_server:
        pool = ProcessPool(
            engine_server=engine_server,
            config=config,
            name="tiny",
            path=str(model),
            listening=SharedListening([[], []], [], []),
            joined=joined,
            files=hashes_of(options, model),
        )
        async with trio.open_nursery() as nursery:
            serve, start = joined.serve, pool.start_elsewhere
            nursery.start_soon(serve, engine_server, start, pool.last_word)
            yield EngineProcess(
                engine_server=engine_server,
                joined=joined,
                config=config,
                checksum=port.checksum,
                address=port.bound,
            )
            nursery.cancel_scope.cancel()


@attrs.define(eq=False, kw_only=True)
class RemoteFrontEnd:
    """A front end that has joined, or tries to."""

    agent: FrontEndAgent
    life: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    """Cancelling it is the front end's death."""
    urls: list[str] = attrs.field(factory=list)
    """Its address, once for each time that it has begun to listen."""
    gone: trio.Event = attrs.field(factory=trio.Event)
    failure: Exception | None = None

    @property
    def url(self) -> str:
        """Its present address."""
        return self.urls[-1]

    async def run(self) -> None:
        """Run until it leaves, or its life ends."""
        with self.life:
            try:
                await self.agent.run()
            except Exception as error:
                self.failure = error
        self.gone.set()

    async def wait_listening(self, times: int = 1) -> None:
        """Block until it has begun to listen so many times."""
        with trio.fail_after(TIMEOUT):
            while len(self.urls) < times:
                await trio.sleep(0.005)

    async def wait_refusing(self) -> None:
        """Block until new connections are refused."""
        with trio.fail_after(TIMEOUT), contextlib.suppress(OSError):
            while True:
                await (await connect(self.url)).aclose()
                await trio.sleep(0.005)

    async def wait_gone(self) -> None:
        """Block until it has ended."""
        with trio.fail_after(TIMEOUT):
            await self.gone.wait()

    async def stream(self, max_tokens: int = 2000) -> trio.SocketStream:
        """Return a connection over which a stream has begun."""
        client = await connect(self.url)
        fields = body(max_tokens=max_tokens, stream=True)
        await client.send_all(raw_request(fields, path=PATH, close=True))
        await read_until(client, b"data: {")
        return client

    async def complete(self, max_tokens: int = 8) -> Any:
        """Return the answer to a request."""
        async with http_client(self.url) as client:
            answer = await client.post(
                PATH, json={**BODY, "max_tokens": max_tokens}, timeout=TIMEOUT
            )
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def get(self, path: str) -> str:
        """Return the answer to a GET."""
        async with http_client(self.url) as client:
            return (await client.get(path, timeout=TIMEOUT)).text


def body(**fields: Any) -> bytes:
    """Return the body of a request."""
    return json.dumps({**BODY, **fields}).encode()


@contextlib.asynccontextmanager
async def running_front_end(
    address: str, tls: Path, model: Path, *, certificates: Any = front_end_tls, **more: Any
) -> AsyncIterator[RemoteFrontEnd]:
    """Run a front end for the block, and kill it at the end."""
    urls: list[str] = []

    def on_listening(own: Sequence[str]) -> None:
        urls.append(own[0])

    options = {"checksum": open_model(model).checksum(), "host": "other", **more}
    front_end = RemoteFrontEnd(
        agent=FrontEndAgent(
            engine=address,
            tls=certificates(str(tls)),
            model=str(model),
            config=ServerConfig(engine=EngineConfig("own"), port=0),
            on_listening=on_listening,
            **options,
        ),
        urls=urls,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(front_end.run)
        yield front_end
        front_end.life.cancel()
