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
    """A call that the worker hasn't answered; ``reply`` stays None if it never will."""

    done: trio.Event = attrs.field(factory=trio.Event)
    reply: wire.Reply | None = None
    result: Any = None
    """Result of the reply, if it is no error."""
    hang_reason: str = ""
    """Reason why the worker counted as hung, if it did."""
    sent_away: bool = False
    """True if the worker was sent to sleep on request."""


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
            if call.sent_away:
                raise WorkerSentAway(f"the worker was sent away before it answered {name!r}")
            why = f": {call.hang_reason}" if call.hang_reason else ""
            raise WorkerLost(f"the worker was lost before it answered {name!r}{why}")
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

    def on_worker_lost(self, hang_reason: str, *, sent_away: bool) -> None:
        """End all pending calls with an error.

        Args:
            hang_reason: Reason why the worker counts as hung, if it does.
            sent_away: True if the worker was sent away on request.
        """
        for call in self._pending.values():
            call.hang_reason, call.sent_away = hang_reason, sent_away
            call.done.set()
