"""``trioserve worker``: the agent of a worker for an engine on another host."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator

import trio

from trioserve._util.exception_groups import sole_exception
from trioserve.cli.worker_options import WorkerOptions
from trioserve.model_files import locate, open_model, task_of
from trioserve.observability.logs import get_logger
from trioserve.observability.signals import dumping_tasks
from trioserve.protocol.errors import ModelLoadError
from trioserve.workers.remote.agent import Agent
from trioserve.workers.remote.tls import worker_tls

_log = get_logger("trioserve.worker")


async def run_agent(options: WorkerOptions, model: str) -> int:
    """Serve an engine until a signal ends the worker, and return the process's exit code.

    The first signal has the engine move the worker's requests, the second ends it at once.

    Raises:
        TrioserveError: The model or the certificates can't be used, or the engine has refused the
            worker.
    """
    assert options.join is not None
    assert options.tls is not None
    tls = worker_tls(options.tls)

    def find() -> tuple[str, str]:
        path = locate(model).resolve()
        if task_of(path) != "generate":
            raise ModelLoadError(f"{model} is an encoder, whose workers can't be on other hosts")
        return str(path), open_model(path).checksum()

    path, checksum = await trio.to_thread.run_sync(find, abandon_on_cancel=True)
    agent = Agent(
        engine=options.join,
        tls=tls,
        model=path,
        checksum=checksum,
        device=options.device,
        num_threads=options.num_threads,
    )
    code = 0

    async def watch(signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
        nonlocal code
        num_signals = 0
        async for number in signals:
            num_signals += 1
            if num_signals > 1:
                code = 128 + number
                scope.cancel()
                return
            _log.info("leaving", signal=signal.Signals(number).name, again="ends at once")
            agent.leave()

    failure: BaseException | None = None
    with (
        trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals,
        dumping_tasks(),
    ):
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch, signals, nursery.cancel_scope)
                await agent.run()
                nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            failure = sole_exception(group)
    if failure is not None:
        raise failure
    return code
