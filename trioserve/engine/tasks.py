"""The tasks of an engine under one nursery: if one fails, all end, and the block with them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import attrs
import trio

from trioserve._util.exception_groups import holds_cancellation, sole_exception
from trioserve.protocol.errors import EngineError, ModelLoadError


@attrs.define(eq=False)
class EngineTasks:
    """Starts tasks that live as long as the block of :func:`open_tasks`."""

    _nursery: trio.Nursery
    _on_failure: Callable[[EngineError], None]
    failure: Exception | None = attrs.field(default=None, init=False)
    """The first that a task raised."""
    is_ready: bool = attrs.field(default=False, init=False)
    """True once the block has all that it needs. Before that, only a task's failure counts."""

    def start_soon(self, run: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Start a task. Its failure is the engine's, and ends the block."""
        self._nursery.start_soon(self._guarded, run, *args, name=run)

    async def start(self, run: Callable[..., Awaitable[None]], *args: Any) -> Any:
        """Start a task, and return the value that it reports when it has begun."""
        return await self._nursery.start(self._guarded, run, *args, name=run)

    # A Ctrl-C in a program that handles no signals is for its main task, not for these.
    @trio.lowlevel.enable_ki_protection
    async def _guarded(
        self, run: Callable[..., Awaitable[None]], *args: Any, **kwargs: Any
    ) -> None:
        try:
            await run(*args, **kwargs)
        except Exception as error:
            self.failure = self.failure or error
            self._on_failure(as_engine_error(self.failure))
            self._nursery.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def open_tasks(on_failure: Callable[[EngineError], None]) -> AsyncIterator[EngineTasks]:
    """Tasks for as long as the block lasts; leaving it cancels them.

    Args:
        on_failure: is told of a task's failure at once, before the others are cancelled.

    Raises:
        ModelLoadError: what a task raised.
        EngineError: what a task raised, or ``__cause__`` is; unless the block itself has failed.

    The block's own exceptions come out as they are.
    """
    tasks: EngineTasks | None = None
    block_error: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            tasks = EngineTasks(nursery, on_failure)
            try:
                yield tasks
            except BaseException as error:
                # Kept out of the nursery, which would wrap it, and copy it if it is a group.
                if holds_cancellation(error):
                    raise
                block_error = error
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        block_error = sole_exception(group)
    assert tasks is not None
    failure = tasks.failure
    if failure is not None and (block_error is None or not tasks.is_ready):
        if isinstance(failure, ModelLoadError):
            raise failure
        raise as_engine_error(failure)
    if block_error is not None:
        raise block_error


def as_engine_error(failure: Exception) -> EngineError:
    """Return the error for an engine's callers when ``failure`` has ended it."""
    if isinstance(failure, EngineError):
        return failure
    error = EngineError(f"the engine failed: {failure}")
    error.__cause__ = failure
    return error
