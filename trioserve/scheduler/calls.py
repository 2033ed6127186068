"""Calls to the worker: rare and slow operations, by name, and their replies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import attrs
import msgspec
import trio

from trioserve.protocol import wire
from trioserve.protocol.errors import CallFailed, WorkerLost, WorkerSentAway


class WorkerCall(Protocol):
    """The type of :meth:`trioserve.scheduler.scheduler.Scheduler.call`."""

    async def __call__(self, name: str, arguments: object = None, *, num_bytes: int = 0) -> Any: ...


@attrs.define(eq=False)
class _PendingCall:
    """A call that the worker hasn't answered; it is ``done`` by a reply or a loss."""

    done: trio.Event = attrs.field(factory=trio.Event)
    reply: wire.Reply | None = None
    result: Any = None
    """Result of the reply, if it is no error."""
    loss: WorkerLost | None = None
    """Loss of the worker before the reply."""


@attrs.define(eq=False)
class Calls:
    """The calls of one scheduler to its current worker.

    Args:
        send: Sends a message before the next plan.
        expect_reply: Takes a call's name and size; returns a context during which the reply is due.
    """

    _send: Callable[[wire.Message], None]
    _expect_reply: Callable[[str, int], contextlib.AbstractContextManager[None]]
    _pending: dict[int, _PendingCall] = attrs.field(init=False, factory=dict)
    _number: int = attrs.field(init=False, default=0)

    async def call(self, name: str, arguments: object = None, *, num_bytes: int = 0) -> Any:
        """Call the worker: see :meth:`trioserve.scheduler.scheduler.Scheduler.call`."""
        encoded = msgspec.msgpack.encode(arguments)
        self._number += 1
        number = self._number
        call = self._pending[number] = _PendingCall()
        try:
            with self._expect_reply(name, num_bytes):
                self._send(wire.Call(number=number, name=name, arguments=encoded))
                await call.done.wait()
        finally:
            del self._pending[number]
        if call.reply is None:
            assert call.loss is not None
            raise _loss_before_answer(name, call.loss)
        if call.reply.error:
            raise CallFailed(name, call.reply.error)
        return call.result

    def answer(self, reply: wire.Reply) -> None:
        """Pass ``reply`` to its caller, unless the caller has given up.

        Raises:
            WorkerLost: The reply can't be read.
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

    def on_worker_lost(self, loss: WorkerLost) -> None:
        """End all pending calls with an error."""
        for call in self._pending.values():
            call.loss = loss
            call.done.set()


def _loss_before_answer(name: str, loss: WorkerLost) -> WorkerLost:
    """Return the error of a call; it leaves out a failed worker's message, as confidential."""
    if isinstance(loss, WorkerSentAway):
        return WorkerSentAway(f"the worker was sent away before it answered {name!r}")
    why = f": {loss}" if loss.reason == "hung" else ""
    message = f"the worker was lost before it answered {name!r}{why}"
    return WorkerLost(message, reason=loss.reason)
