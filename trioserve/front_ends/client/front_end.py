"""A front end between its start message and its end: the model's texts, an engine, HTTP."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import trio

from trioserve._util.pair_socket import MessageSocket
from trioserve.engine.loaded_model import LoadedModel, in_thread
from trioserve.engine.media import ModelMedia, open_media
from trioserve.engine.nursery import Place, run_tasks
from trioserve.engine.request_engine import RequestEngine
from trioserve.engine.tasks import EngineTasks
from trioserve.front_ends.calls import FrontEndCalls
from trioserve.front_ends.client.encoding import remote_encoding
from trioserve.front_ends.client.scheduler import RemoteScheduler, receive_from_engine
from trioserve.front_ends.client.server_api import RemoteServer
from trioserve.front_ends.clock import SharedClock
from trioserve.front_ends.files import check_files
from trioserve.front_ends.heartbeat import interval_of
from trioserve.front_ends.messages import (
    Drained,
    Failed,
    FrontEndListening,
    FrontEndStart,
    Stop,
    encode,
)
from trioserve.front_ends.serving import serve_engine
from trioserve.front_ends.wire_errors import fault_of
from trioserve.http import create_app
from trioserve.http.server.listeners import OpenListeners
from trioserve.observability.logs import get_logger
from trioserve.observability.metrics import Metrics
from trioserve.observability.tracing import open_tracing
from trioserve.protocol import wire
from trioserve.protocol.errors import TrioserveError

_log = get_logger("trioserve.front_end")


@attrs.define(eq=False, kw_only=True)
class StartedFrontEnd:
    """A front end that was told what to serve.

    Args:
        socket: Connected to the engine process.
        start: What it serves.
        clock: Translates the engine process's times.
        listening: Returns what it listens on (default: what the configuration says).
        on_listening: Called with the URLs that it listens on, once it does.
        shutdown: Set when it is to drain.
    """

    socket: MessageSocket
    start: FrontEndStart
    clock: SharedClock
    listening: Callable[[], OpenListeners | None] = lambda: None
    on_listening: Callable[[Sequence[str]], None]
    shutdown: trio.Event = attrs.field(factory=trio.Event)
    serving: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    """Cancelled when it is to leave."""
    _remote: RemoteScheduler | None = attrs.field(init=False, default=None)

    @property
    def num_requests(self) -> int:
        """Requests that the engine process computes."""
        return 0 if self._remote is None else self._remote.num_requests

    async def run(self) -> int:
        """Serve until drained, or until told to leave; return how many requests were cut off.

        Raises:
            TrioserveError: It can't serve, and why. The engine process was told.
            EngineError: The engine process has failed, or is gone.
        """
        num_cut = 0
        with self.serving:
            failure: Exception | None = None
            try:
                num_cut = await self._serve()
            except Exception as error:
                failure = error
            if failure is None:
                await self._tell_last(Drained(num_cut))
            elif self._remote is None or not self._remote.is_dismissed:
                if not isinstance(failure, TrioserveError):
                    # The engine process reports trioserve's own errors.
                    _log.error("front end failed", exc_info=failure)
                await self._tell_last(Failed(fault_of(failure)))
            if failure is not None:
                raise failure
        return num_cut

    async def _tell_last(self, message: Drained | Failed) -> None:
        """Send the last message. It is lost if its socket closes before it was heard."""
        await self.socket.send(encode(message))
        while not isinstance(await receive_from_engine(self.socket), (Stop, Failed)):
            pass

    async def _serve(self) -> int:
        """Serve until drained; return how many requests were cut off."""
        start, config, path = self.start, self.start.config, Path(self.start.path)
        if start.files:
            await in_thread(functools.partial(check_files, start.files, config.engine, path))
        model = attrs.evolve(await LoadedModel.read(config.engine, path), name=start.name)
        if start.index == 0:
            model.log_defaults()
        names = config.served_model_name or (model.name,)
        metrics = Metrics(names[0], config.engine.metrics_prefix)
        handlers: dict[str, Callable[[Any], Awaitable[Any]]] = {}
        remote = self._remote = RemoteScheduler(
            self.socket,
            handlers,
            clock=self.clock,
            ready=start.ready,
            on_drain=self.shutdown.set,
            on_stop=self.serving.cancel,
            alive_interval=interval_of(config.engine),
        )
        remote.catalogue.replace(start.adapters)

        async with contextlib.AsyncExitStack() as stack:
            tracing = await stack.enter_async_context(
                open_tracing(config.engine.otlp_traces_endpoint)
            )
            # A front end of another host has files to check.
            shares_memory = not start.files
            media = await stack.enter_async_context(
                open_media(config.engine, model, path, metrics, shares_memory=shares_memory)
            )
            engine = await stack.enter_async_context(self._run_tasks(model, remote, metrics, media))
            tracing.model_name = engine.model_name
            engine.on_request_end = tracing.request_ended
            engine.pooling.on_end = tracing.texts_ended
            server_api = RemoteServer(engine, remote, start.index)
            handlers.update(FrontEndCalls.handlers(server_api))
            return await serve_engine(
                engine,
                create_app(engine, config, server_api=server_api),
                config,
                listening=self.listening(),
                shutdown=self.shutdown,
                task_status=_Started(self._note_listening),
            )

    def _run_tasks(
        self,
        model: LoadedModel,
        remote: RemoteScheduler,
        metrics: Metrics,
        media: ModelMedia,
    ) -> contextlib.AbstractAsyncContextManager[RequestEngine]:
        start = self.start

        async def open_remote(tasks: EngineTasks) -> wire.Ready:
            tasks.start_soon(remote.attach)
            return start.ready

        return run_tasks(
            start.config.engine,
            model,
            remote,
            metrics,
            open_remote,
            functools.partial(
                RequestEngine,
                worker_restarts=lambda: remote.state.worker_restarts,
                encoding=remote_encoding(model, remote.calls),
                speech=media.speech_reader(remote.calls),
            ),
            validation=None,
            prompt_media=media.embedder(remote.calls),
            output_buffer=0,
            place=Place(index=start.index, count=start.count),
        )

    def _note_listening(self, urls: Sequence[str]) -> None:
        assert self._remote is not None
        self.on_listening(urls)
        self._remote.tell(FrontEndListening())


@attrs.frozen
class _Started:
    """A ``trio.TaskStatus``: the front end listens."""

    _note: Callable[[Sequence[str]], None]

    def started(self, value: Sequence[str] = ()) -> None:
        """Note the URLs."""
        self._note(value)
