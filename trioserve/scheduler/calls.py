"""Calls to the worker, the rare and slow things that it does by name, and who waits for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import attrs
import msgspec
import trio

from trioserve import wire
from trioserve.errors import CallFailed, WorkerLost

__all__ = ["Calls"]

QUICK_CALLS = frozenset(
    {"load_adapter", "ping", "prepare", "read_weights", "statistics", "unload_adapter"}
)
"""Calls that keep the worker from its steps for no time to speak of, or for none."""


@attrs.define(eq=False)
class _PendingCall:
    """A call that the worker hasn't answered: ``reply`` is None if it never will."""

    done: trio.Event = attrs.field(factory=trio.Event)
    reply: wire.Reply | None = None
    result: Any = None
    """What the reply holds, if it is no error."""


@attrs.define(eq=False)
class Calls:
    """The calls of one scheduler, to whatever worker there is.

    Args:
        send: sends a message before the next plan.
        hold: a context in which the worker isn't blamed for a step that has to wait.
    """

    _send: Callable[[wire.Message], None]
    _hold: Callable[[], contextlib.AbstractContextManager[None]]
    _pending: dict[int, _PendingCall] = attrs.field(init=False, factory=dict)
    _number: int = attrs.field(init=False, default=0)

    async def call(self, name: str, arguments: object) -> Any:
        """See :meth:`trioserve.scheduler.Scheduler.call`; there is a worker."""
        encoded = msgspec.msgpack.encode(arguments)
        self._number += 1
        number = self._number
        call = self._pending[number] = _PendingCall()
        self._send(wire.Call(number=number, name=name, arguments=encoded))
        try:
            with contextlib.nullcontext() if name in QUICK_CALLS else self._hold():
                await call.done.wait()
        finally:
            del self._pending[number]
        if call.reply is None:
            raise WorkerLost(f"the worker was lost before it answered {name!r}")
        if call.reply.error:
            raise CallFailed(name, call.reply.error)
        return call.result

    def answer(self, reply: wire.Reply) -> None:
        """Hand ``reply`` over. The caller may have given up; then nobody wants it.

        Raises:
            WorkerLost: it can't be read.
        """
        call = self._pending.get(reply.number)
        if call is None:
            return
        if not reply.error:
            try:
                call.result = msgspec.msgpack.decode(reply.result)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise WorkerLost(f"the worker sent a damaged reply: {error}") from error
        call.reply = reply
        call.done.set()

    def on_worker_lost(self) -> None:
        """Nobody will answer any more."""
        for call in self._pending.values():
            call.done.set()
