"""Front ends and their engine process in one program: real sockets between them, a fake worker."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import attrs
import trio

from trioserve import EngineConfig, ServerConfig
from trioserve._util.pair_socket import PairSocket
from trioserve.engine.engine_worker import EngineWorker
from trioserve.engine.loaded_model import LoadedModel, chosen_generation_config
from trioserve.engine.nursery import Place, run_tasks
from trioserve.engine.request_engine import RequestEngine
from trioserve.engine.tasks import EngineTasks
from trioserve.front_ends.calls import FrontEndCalls
from trioserve.front_ends.client.encoding import remote_encoding
from trioserve.front_ends.client.scheduler import RemoteScheduler
from trioserve.front_ends.client.server_api import RemoteServer
from trioserve.front_ends.clock import SharedClock
from trioserve.front_ends.heartbeat import interval_of
from trioserve.front_ends.server.engine_server import EngineServer, open_host
from trioserve.front_ends.server.session import FrontEndSession
from trioserve.model_files import EncoderConfig
from trioserve.model_files.generation_config import GenerationConfig
from trioserve.observability.metrics import Metrics
from trioserve.protocol import wire
from trioserve.protocol.errors import FrontEndLost
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import (
    FAKE_CHAT_TEMPLATE,
    byte_tokenizer,
    fake_encoder_model,
    run_fake_worker,
)
from trioserve.text.chat_template import ChatTemplate
from trioserve.text.tokenizer import Tokenizer
from trioserve.workers.supervisor import OpenWorker

__all__ = ["FrontEnd", "Server", "open_server"]


@attrs.frozen(kw_only=True)
class FrontEnd:
    """One front end, and its home in the engine process."""

    engine: RequestEngine
    remote: RemoteScheduler
    server_api: RemoteServer
    peer: FrontEndSession
    life: trio.CancelScope
    """Cancelling it is the front end's death, as the engine process sees it."""
    gone: trio.Event
    """Set when the engine process has noticed."""


@attrs.frozen(kw_only=True)
class Server:
    """The engine process and all front ends."""

    engine_server: EngineServer
    front_ends: list[FrontEnd]

    async def wait_nothing_held(self) -> None:
        """Wait until no request runs or waits, then assert that nothing is held."""
        with trio.fail_after(30):
            while not (
                self.engine_server.idle and all(each.engine.idle for each in self.front_ends)
            ):
                await trio.sleep(0.005)
        self.engine_server.check_integrity()
        for each in self.front_ends:
            each.engine.check_integrity()
        statistics = self.engine_server.statistics().scheduler
        assert statistics.num_running == statistics.num_waiting == statistics.pages_held == 0


@contextlib.asynccontextmanager
async def open_server(
    folder: Path,
    make_worker: Callable[[], FakeWorker] = FakeWorker,
    *,
    count: int = 2,
    open_worker: OpenWorker | None = None,
    encoder: EncoderConfig | None = None,
    server_options: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[Server]:
    """Open a server with front ends in this program as engines; their sockets are in ``folder``.

    With ``encoder`` the model is an encoder.
    """
    engine_config = EngineConfig("fake", **options)
    config = ServerConfig(engine=engine_config, api_server_count=count, **(server_options or {}))
    metrics = Metrics("fake")
    opened = open_worker or (lambda: run_fake_worker(make_worker(), engine_config))
    async with (
        open_host(
            config,
            lambda index, device=None: EngineWorker.of(index, engine_config, metrics, opened),
            metrics,
            task="generate" if encoder is None else encoder.task,
        ) as engine_server,
        contextlib.AsyncExitStack() as stack,
    ):
        nursery = await stack.enter_async_context(trio.open_nursery())
        front_ends = [
            await stack.enter_async_context(
                _open_front_end(engine_server, config, index, folder, nursery, encoder)
            )
            for index in range(count)
        ]
        yield Server(engine_server=engine_server, front_ends=front_ends)
        nursery.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def _open_front_end(
    engine_server: EngineServer,
    config: ServerConfig,
    index: int,
    folder: Path,
    nursery: trio.Nursery,
    encoder: EncoderConfig | None,
) -> AsyncIterator[FrontEnd]:
    url = f"ipc://{folder}/{index}.sock"
    life, gone = trio.CancelScope(), trio.Event()
    handlers: dict[str, Callable[[Any], Awaitable[Any]]] = {}

    async def keep(
        socket: PairSocket, task_status: trio.TaskStatus[FrontEndSession] = trio.TASK_STATUS_IGNORED
    ) -> None:
        with life, engine_server.at_home(socket) as peer, contextlib.suppress(FrontEndLost):
            task_status.started(peer)
            await peer.run()
        gone.set()

    async def open_remote(tasks: EngineTasks) -> wire.Ready:
        tasks.start_soon(remote.attach)
        return engine_server.ready

    model = LoadedModel(
        name="fake",
        tokenizer=Tokenizer(byte_tokenizer(), ChatTemplate(FAKE_CHAT_TEMPLATE)),
        eos_token_ids=(),
        generation=chosen_generation_config(GenerationConfig(), config.engine),
    )
    if encoder is not None:
        model = fake_encoder_model(encoder)
    with (
        contextlib.closing(PairSocket.listen(url)) as listening,
        contextlib.closing(PairSocket.dial(url)) as dialed,
    ):
        peer = await nursery.start(keep, listening)
        remote = RemoteScheduler(
            dialed,
            handlers,
            clock=SharedClock.now(),
            ready=engine_server.ready,
            on_drain=lambda: None,
            on_stop=lambda: None,
            alive_interval=interval_of(config.engine),
        )
        async with run_tasks(
            config.engine,
            model,
            remote,
            Metrics("fake"),
            open_remote,
            functools.partial(
                RequestEngine,
                worker_restarts=lambda: remote.state.worker_restarts,
                encoding=remote_encoding(model, remote.calls),
            ),
            validation=None,
            output_buffer=0,
            place=Place(index=index, count=config.api_server_count),
        ) as engine:
            server_api = RemoteServer(engine, remote, index)
            handlers.update(FrontEndCalls.handlers(server_api))
            yield FrontEnd(
                engine=engine, remote=remote, server_api=server_api, peer=peer, life=life, gone=gone
            )
