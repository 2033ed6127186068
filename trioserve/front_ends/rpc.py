"""Calls between two processes by name, each answered in a task of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import attrs
import trio

from trioserve.front_ends.messages import RpcCall, RpcCancel, RpcReply
from trioserve.front_ends.wire_errors import error_of, fault_of
from trioserve.protocol.errors import TrioserveError

Handlers = Mapping[str, Callable[[Any], Awaitable[Any]]]
"""Handlers by name. They take arguments of MessagePack's types."""


@attrs.define(eq=False)
class _Question:
    """An open call of this side: ``answer`` stays None if it is never answered."""

    done: trio.Event = attrs.field(factory=trio.Event)
    answer: RpcReply | None = None


@attrs.define(eq=False)
class RpcPeer:
    """One side's calls and its replies to the other's.

    Args:
        send: sends a message, without waiting.
        handlers: answer calls.
        lost: the error of open calls when the other side is gone.
    """

    _send: Callable[[RpcCall | RpcReply | RpcCancel], None]
    _handlers: Handlers
    _lost: TrioserveError
    _number: int = attrs.field(init=False, default=0)
    _questions: dict[int, _Question] = attrs.field(init=False, factory=dict)
    _answering: dict[int, trio.CancelScope] = attrs.field(init=False, factory=dict)
    _is_closed: bool = attrs.field(init=False, default=False)

    async def ask(self, name: str, arguments: object = None) -> Any:
        """Call the other side, and return its reply.

        The deadline is the caller's, and reaches the other side.

        Raises:
            TrioserveError: the other side's own, or that it is gone.
        """
        if self._is_closed:
            raise self._lost
        self._number += 1
        number, question = self._number, _Question()
        self._questions[number] = question
        self._send(RpcCall(number, name, arguments))
        try:
            await question.done.wait()
        except trio.Cancelled:
            self._send(RpcCancel(number))
            raise
        finally:
            del self._questions[number]
        if question.answer is None:
            raise self._lost
        if question.answer.fault is not None:
            raise error_of(question.answer.fault)
        return question.answer.result

    def on_ask(self, message: RpcCall, nursery: trio.Nursery) -> None:
        """Answer the other side's call in a task of ``nursery``."""
        self._answering[message.number] = scope = trio.CancelScope()
        nursery.start_soon(self._answer, message, scope)

    async def _answer(self, message: RpcCall, scope: trio.CancelScope) -> None:
        try:
            with scope:
                # A call that was cancelled before this began must do nothing: a handler that never
                # waits wouldn't notice the cancellation.
                await trio.lowlevel.checkpoint()
                result = await self._handlers[message.name](message.arguments)
                self._send(RpcReply(message.number, result))
        except TrioserveError as error:
            self._send(RpcReply(message.number, fault=fault_of(error)))
        finally:
            del self._answering[message.number]

    def on_answer(self, message: RpcReply) -> None:
        """Hand a reply over, unless its call was cancelled."""
        question = self._questions.get(message.number)
        if question is not None:
            question.answer = message
            question.done.set()

    def on_withdraw(self, message: RpcCancel) -> None:
        """Cancel the handler of a call that the other side has cancelled."""
        scope = self._answering.get(message.number)
        if scope is not None:
            scope.cancel()

    def close(self) -> None:
        """Fail all open calls, because the other side is gone. Idempotent."""
        self._is_closed = True
        for question in self._questions.values():
            question.done.set()
