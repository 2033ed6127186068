"""A front end's own program: from Hello until it is told to leave, or its standard input ends."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import structlog
import trio

from trioserve._util.pair_socket import PairSocket, SocketFailed
from trioserve.engine.loaded_model import LoadedModel
from trioserve.engine.nursery import Place, run_tasks
from trioserve.engine.request_engine import RequestEngine
from trioserve.engine.tasks import EngineTasks
from trioserve.front_ends.calls import FrontEndCalls
from trioserve.front_ends.client.encoding import remote_encoding
from trioserve.front_ends.client.scheduler import RemoteScheduler, receive_from_engine
from trioserve.front_ends.client.server_api import RemoteServer
from trioserve.front_ends.heartbeat import interval_of
from trioserve.front_ends.messages import (
    Drained,
    Failed,
    FrontEndHello,
    FrontEndListening,
    FrontEndStart,
    Stop,
    encode,
)
from trioserve.front_ends.processes.process import package_folder
from trioserve.front_ends.serving import serve_engine
from trioserve.front_ends.wire_errors import fault_of
from trioserve.http import create_app
from trioserve.http.server.connections import raise_descriptor_limit
from trioserve.http.server.listeners import inherited
from trioserve.observability.logs import get_logger, setup_logging
from trioserve.observability.metrics import Metrics
from trioserve.observability.signals import dumping_tasks
from trioserve.observability.tracing import open_tracing
from trioserve.protocol import wire
from trioserve.protocol.errors import EngineError, TrioserveError
from trioserve.protocol.gc_tuning import rare_collections
from trioserve.protocol.version import __version__

EXIT_FAILED = 1
EXIT_PARENT_GONE = 3

_log = get_logger("trioserve.front_end")


def run(url: str, index: int, descriptors: Sequence[int]) -> None:
    """Serve the engine process that listens at ``url``, on sockets that were inherited."""
    # On every line of the log.
    structlog.contextvars.bind_contextvars(front_end=index)
    front_end = _FrontEnd(descriptors)
    trio.run(front_end.main, url)
    # Threads that were given up aren't waited for.
    sys.stderr.flush()
    os._exit(front_end.exit_code)


@attrs.define(eq=False)
class _FrontEnd:
    _descriptors: Sequence[int]
    exit_code: int = 0
    _remote: RemoteScheduler | None = None
    _shutdown: trio.Event = attrs.field(factory=trio.Event)
    """Set when it is to drain."""
    _serving: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    """Cancelled when it is to leave."""

    async def main(self, url: str) -> None:
        """Talk to the engine process from beginning to end."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_parent)
            try:
                with contextlib.closing(PairSocket.dial(url)) as socket, self._serving:
                    await self._talk(socket)
            except (EngineError, SocketFailed):
                # The engine process has given this one up, and knows why.
                self.exit_code = EXIT_FAILED
            nursery.cancel_scope.cancel()

    async def _talk(self, socket: PairSocket) -> None:
        hello = FrontEndHello(package_folder(), __version__, os.getpid())
        await socket.send(encode(hello))
        start = await receive_from_engine(socket)
        if not isinstance(start, FrontEndStart):
            return
        last_word = await self._serve(socket, start)
        if last_word is not None:
            await socket.send(encode(last_word))
            # A message is lost if its socket closes too soon: stay until it was heard.
            while not isinstance(await receive_from_engine(socket), (Stop, Failed)):
                pass

    async def _watch_parent(self) -> None:
        """Leave when standard input ends. The engine process holds the other end."""
        await trio.lowlevel.wait_readable(0)
        self.exit_code = EXIT_PARENT_GONE
        self._serving.cancel()

    async def _serve(self, socket: PairSocket, start: FrontEndStart) -> Drained | Failed | None:
        """Serve until drained, or until it fails; return the last message for the engine process.

        There is none if the engine process itself has failed.
        """
        setup_logging(start.config.log_level, start.config.log_format)
        raise_descriptor_limit()
        try:
            with dumping_tasks(1 + start.index), rare_collections() as freeze:
                return Drained(await self._run(socket, start, freeze))
        except Exception as error:
            self.exit_code = EXIT_FAILED
            if not isinstance(error, TrioserveError):
                # The engine process reports trioserve's own errors.
                _log.exception("front end failed")
            return None if self._is_dismissed else Failed(fault_of(error))

    @property
    def _is_dismissed(self) -> bool:
        return self._remote is not None and self._remote.is_dismissed

    async def _run(
        self, socket: PairSocket, start: FrontEndStart, freeze: Callable[[], None]
    ) -> int:
        """Serve until drained; return how many requests were cut off."""
        config = start.config
        model = await LoadedModel.read(config.engine, Path(start.path))
        if start.index == 0:
            model.log_defaults()
        others = [each for each in self._descriptors if each not in start.sockets]
        names = config.served_model_name or (model.name,)
        metrics = Metrics(names[0], config.engine.metrics_prefix)
        handlers: dict[str, Callable[[Any], Awaitable[Any]]] = {}
        remote = self._remote = RemoteScheduler(
            socket,
            handlers,
            on_drain=self._shutdown.set,
            on_stop=self._serving.cancel,
            alive_interval=interval_of(config.engine),
        )

        remote.catalogue.replace(start.adapters)

        async def open_remote(tasks: EngineTasks) -> wire.Ready:
            tasks.start_soon(remote.attach)
            return start.ready

        async with open_tracing(config.engine.otlp_traces_endpoint) as tracing:
            async with run_tasks(
                config.engine,
                model,
                remote,
                metrics,
                open_remote,
                functools.partial(
                    RequestEngine,
                    worker_restarts=lambda: remote.state.worker_restarts,
                    encoding=remote_encoding(model, remote.calls),
                ),
                validation=None,
                output_buffer=0,
                place=Place(index=start.index, count=start.count),
            ) as engine:
                tracing.model_name = engine.model_name
                engine.on_request_end = tracing.request_ended
                engine.pooling.on_end = tracing.texts_ended
                server_api = RemoteServer(engine, remote, start.index)
                handlers.update(FrontEndCalls.handlers(server_api))
                return await serve_engine(
                    engine,
                    create_app(engine, config, server_api=server_api),
                    config,
                    listening=inherited(config, start.sockets, others),
                    shutdown=self._shutdown,
                    task_status=_Started(
                        functools.partial(remote.tell, FrontEndListening()), freeze
                    ),
                )


@attrs.frozen
class _Started:
    """A ``trio.TaskStatus``: everything is there, and the front end listens."""

    _say: Callable[[], None]
    _settle: Callable[[], None]

    def started(self, _: object = None) -> None:
        """Tell the engine process."""
        self._settle()
        self._say()
