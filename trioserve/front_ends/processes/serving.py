"""A whole server of several processes in one task: the engine process's part of it."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path

import attrs
import trio

from trioserve._util.exception_groups import sole_exception
from trioserve.config import ServerConfig
from trioserve.engine.loaded_model import in_thread
from trioserve.engine.worker_start import WorkerProcesses, locate_model, log_loaded, workers_port
from trioserve.front_ends.files import hashes_of
from trioserve.front_ends.processes.pool import ProcessPool
from trioserve.front_ends.remote.joined import JoinedFrontEnds
from trioserve.front_ends.server.engine_server import open_host
from trioserve.http.server.listeners import open_shared_listening, removing_socket_file
from trioserve.model_files import task_of
from trioserve.model_files.locate import default_name
from trioserve.observability.metrics import Metrics, measure_loop_lag
from trioserve.protocol import wire
from trioserve.workers.life import OnProgress


async def serve_with_front_ends(
    config: ServerConfig,
    *,
    shutdown: trio.Event,
    on_progress: OnProgress | None,
    mock: wire.MockSteps | None,
    task_status: trio.TaskStatus[list[str]],
) -> int:
    """:func:`trioserve.front_ends.serving.serve` with ``api_server_count`` front-end processes."""
    path = await locate_model(config.engine)
    task = await trio.to_thread.run_sync(task_of, path)
    name = _name_of(config, path)
    metrics = Metrics((config.served_model_name or (name,))[0], config.engine.metrics_prefix)
    processes = WorkerProcesses.of(config.engine, path, on_progress, mock)
    make_worker = processes.maker(config.engine, metrics)
    port = await workers_port(config.engine, path, mock)
    joined: JoinedFrontEnds | None = None
    files: dict[str, str] = {}
    if port is not None:
        port.front_ends = joined = JoinedFrontEnds()
        files = await in_thread(functools.partial(hashes_of, config.engine, path))
    async with open_host(config, make_worker, metrics, task=task, port=port) as engine_server:
        log_loaded(metrics.model_name, engine_server.ready, config.engine.num_workers)
        listening = await open_shared_listening(config, config.api_server_count)
        with removing_socket_file(config), contextlib.closing(listening):
            pool = ProcessPool(
                engine_server=engine_server,
                config=config,
                name=name,
                path=str(path.resolve()),
                listening=listening,
                joined=joined,
                files=files,
            )
            failure: BaseException | None = None
            num_cut = 0
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(measure_loop_lag, metrics.loop_lag)
                    num_cut = await pool.serve(shutdown, _Listening(task_status, listening.urls))
                    nursery.cancel_scope.cancel()
            except BaseExceptionGroup as group:
                failure = sole_exception(group)
            if failure is not None:
                raise failure
    return num_cut


def _name_of(config: ServerConfig, path: Path) -> str:
    """Return the model's name where the options give it none."""
    return default_name(path) if Path(config.engine.model).exists() else config.engine.model


@attrs.frozen
class _Listening:
    """A ``trio.TaskStatus``: all front ends listen."""

    _status: trio.TaskStatus[list[str]]
    _urls: list[str]

    def started(self, _: object = None) -> None:
        """Tell the URLs."""
        self._status.started(self._urls)
