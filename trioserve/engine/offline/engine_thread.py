"""A thread that runs trio and one engine, and calls functions for other threads."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any

import attrs
import trio

from trioserve.config import EngineConfig
from trioserve.engine.engine import Engine
from trioserve.engine.nursery import open_engine
from trioserve.engine.offline.room import Room
from trioserve.protocol.errors import EngineError


@attrs.define(eq=False)
class EngineThread:
    """An engine in a thread of its own, open until :meth:`request_stop`.

    Calls come from any thread. Each is a task in a nursery inside the engine's block, so stopping
    the engine ends all of them.
    """

    config: EngineConfig
    started: Future[None] = attrs.field(init=False, factory=Future)
    """Done when the model is loaded, or can't be; it has the error then."""
    ended: Future[None] = attrs.field(init=False, factory=Future)
    """Done when the thread has nothing left to do."""
    room: Room = attrs.field(init=False)
    """Admission to the engine's queue; set once ``started`` is done."""
    _engine: Engine = attrs.field(init=False)
    _thread: threading.Thread = attrs.field(init=False)
    _token: trio.lowlevel.TrioToken | None = attrs.field(init=False, default=None)
    _nursery: trio.Nursery | None = attrs.field(init=False, default=None)
    _scope: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    _stopping: bool = attrs.field(init=False, default=False)
    _lock: threading.Lock = attrs.field(init=False, factory=threading.Lock)
    """Guards ``_calls`` and ``_failure``."""
    _calls: set[Future[Any]] = attrs.field(init=False, factory=set)
    """The calls that aren't done."""
    _failure: Exception | None = attrs.field(init=False, default=None)
    """The error of calls that come after the end; None before it."""

    def start(self) -> None:
        """Start the thread. ``started`` tells what becomes of it."""
        self._thread = threading.Thread(target=self._run, name="trioserve-llm", daemon=True)
        self._thread.start()

    def request_stop(self) -> None:
        """Close the engine, without waiting for it. Idempotent."""
        self._stopping = True
        self._soon(self._scope.cancel)

    def stop(self) -> None:
        """Close the engine and block until the thread has ended. Idempotent."""
        self.request_stop()
        self._thread.join()

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Call ``function(engine, *args)`` in the thread, and await its result if it has to be.

        Cancelling the future cancels the call.

        Raises:
            EngineError: the engine has failed or is closed. A call that is cut off by its end gets
                the same from the future.
        """
        future: Future[Any] = Future()
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._calls.add(future)
        scope = trio.CancelScope()
        future.add_done_callback(functools.partial(self._on_done, scope))
        self._soon(self._spawn, future, scope, function, args)
        return future

    def _on_done(self, scope: trio.CancelScope, future: Future[Any]) -> None:
        with self._lock:
            self._calls.discard(future)
        if future.cancelled():
            self._soon(scope.cancel)

    def _soon(self, function: Callable[..., object], *args: Any) -> None:
        """Call ``function`` in the thread's loop; do nothing if that is over or hasn't begun."""
        if self._token is not None:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(function, *args)

    def _spawn(self, future: Future[Any], *args: Any) -> None:
        # Without a nursery the engine is closing, and `_run` fails the future.
        if self._nursery is not None:
            self._nursery.start_soon(self._answer, future, *args)

    async def _answer(
        self,
        future: Future[Any],
        scope: trio.CancelScope,
        function: Callable[..., Any],
        args: tuple[Any, ...],
    ) -> None:
        """Run one call and settle its future. Raises nothing but a cancellation."""
        try:
            with scope:
                result = function(self._engine, *args)
                if inspect.isawaitable(result):
                    result = await result
                _settle(future, result)
        except Exception as error:
            _settle(future, error=error)

    def _run(self) -> None:
        error: Exception = EngineError("this LLM is closed")
        try:
            trio.run(self._main)
        except Exception as failure:
            error = failure
        with self._lock:
            self._failure = error
            calls = list(self._calls)
        for future in (self.started, *calls):
            _settle(future, error=error)
        self.ended.set_result(None)

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        if self._stopping:  # It was set before there was a token to cancel the scope with.
            return
        with self._scope:
            async with open_engine(self.config) as self._engine:
                self.room = Room(max(self._engine.config.max_num_queued_reqs, 1))
                try:
                    async with trio.open_nursery() as self._nursery:
                        _settle(self.started, None)
                        await trio.sleep_forever()
                finally:
                    self._nursery = None


def _settle(future: Future[Any], result: Any = None, *, error: Exception | None = None) -> None:
    """Give a future its result or its error, unless it has one or was cancelled."""
    with contextlib.suppress(InvalidStateError):
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
