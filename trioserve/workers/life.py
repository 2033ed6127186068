"""The life of a worker: a block that begins when it has loaded its model and ends with its loss.

It is the same for a worker process on this host (:mod:`trioserve.workers.process`) and for one that
has joined from another host (:mod:`trioserve.workers.remote`).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Protocol

import trio

from trioserve._util.exception_groups import sole_exception
from trioserve.protocol import wire
from trioserve.protocol.errors import ModelLoadError, WorkerLost
from trioserve.workers import Link

OnProgress = Callable[[wire.LoadingProgress], None]


class StartedWorker(Protocol):
    """A worker that hasn't loaded a model yet."""

    @property
    def name(self) -> str:
        """Name in errors."""
        ...

    @property
    def link(self) -> Link:
        """The link to it."""
        ...

    async def greet(self) -> None:
        """Block until it can be told what to load.

        Raises:
            WorkerLost: It said nothing, or something else.
            EngineError: It isn't of this installation.
        """
        ...

    async def wait_lost(self) -> WorkerLost:
        """Block until it is lost; return why."""
        ...

    def serving(self) -> AbstractContextManager[None]:
        """Open a block in which it serves."""
        ...

    def identified(self, ready: wire.Ready) -> wire.Ready:
        """Return its ``Ready`` with what only this side knows."""
        ...


@contextlib.asynccontextmanager
async def run_worker(
    opened: AbstractAsyncContextManager[StartedWorker],
    start: wire.Start,
    *,
    start_timeout: float,
    on_progress: OnProgress,
) -> AsyncIterator[tuple[Link, wire.Ready]]:
    """Run a loaded worker for the block.

    Args:
        opened: Opens the worker.
        start: What the worker loads.
        start_timeout: Most seconds without progress while it loads.
        on_progress: Called with each sign of progress while it loads.

    Raises:
        ModelLoadError: The worker can't load the model.
        EngineError: The worker is of another package named gpu, or another version.
        WorkerLost: The worker was lost, or hung while loading; a block that had begun is cancelled.
        NoRoomForWorker: A process can't be created.
    """
    lost: WorkerLost | None = None
    async with opened as worker:

        async def watch(scope: trio.CancelScope) -> None:
            nonlocal lost
            lost = await worker.wait_lost()
            scope.cancel()

        body_error: BaseException | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch, nursery.cancel_scope)
                await worker.greet()
                await worker.link.send(start)
                ready = await _load(worker.link, start_timeout, on_progress)
                with worker.serving():
                    yield worker.link, worker.identified(ready)
                nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            # The watcher raises nothing, so this can only be the block's own exception.
            body_error = sole_exception(group)
        if isinstance(body_error, WorkerLost):
            message = f"{worker.name}: {body_error}"
            raise WorkerLost(message, reason=body_error.reason) from body_error
        if body_error is not None:
            raise body_error
    if lost is not None:
        raise lost


async def _load(link: Link, start_timeout: float, on_progress: OnProgress) -> wire.Ready:
    while True:
        with trio.move_on_after(start_timeout) as scope:
            message = await link.receive()
        if scope.cancelled_caught:
            raise WorkerLost(
                f"the worker made no progress for {start_timeout:g} s while loading "
                "(--worker-start-timeout)",
                reason="hung",
            )
        match message:
            case wire.LoadingProgress():
                on_progress(message)
            case wire.Ready():
                return message
            case wire.Failure():
                raise ModelLoadError(message.message)
            case _:
                raise WorkerLost(f"the worker sent {type(message).__name__} while loading")
