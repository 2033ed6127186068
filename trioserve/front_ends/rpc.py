"""Questions between two processes: rare things, by name, each answered in a task of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import attrs
import trio

from trioserve.front_ends.messages import RpcCall, RpcCancel, RpcReply
from trioserve.front_ends.wire_errors import error_of, fault_of
from trioserve.protocol.errors import TrioserveError

Handlers = Mapping[str, Callable[[Any], Awaitable[Any]]]
"""What answers a question of each name, given its arguments, of MessagePack's types."""


@attrs.define(eq=False)
class _Question:
    """One of ours that isn't answered: ``answer`` is None if it never will be."""

    done: trio.Event = attrs.field(factory=trio.Event)
    answer: RpcReply | None = None


@attrs.define(eq=False)
class RpcPeer:
    """One side's questions and its answers to the other's.

    Args:
        send: sends a message, without waiting.
        handlers: who answers.
        lost: what those are told that wait when the other side is gone.
    """

    _send: Callable[[RpcCall | RpcReply | RpcCancel], None]
    _handlers: Handlers
    _lost: TrioserveError
    _number: int = attrs.field(init=False, default=0)
    _questions: dict[int, _Question] = attrs.field(init=False, factory=dict)
    _answering: dict[int, trio.CancelScope] = attrs.field(init=False, factory=dict)
    _is_closed: bool = attrs.field(init=False, default=False)

    async def ask(self, name: str, arguments: object = None) -> Any:
        """What the other side answers. The deadline is the caller's, and reaches the other side.

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
        """Answer the other side's question in a task of ``nursery``."""
        self._answering[message.number] = scope = trio.CancelScope()
        nursery.start_soon(self._answer, message, scope)

    async def _answer(self, message: RpcCall, scope: trio.CancelScope) -> None:
        try:
            with scope:
                # Where it was withdrawn before this began, nothing is to be done that whoever asked
                # has taken back by now: a handler that never waits wouldn't notice.
                await trio.lowlevel.checkpoint()
                result = await self._handlers[message.name](message.arguments)
                self._send(RpcReply(message.number, result))
        except TrioserveError as error:
            self._send(RpcReply(message.number, fault=fault_of(error)))
        finally:
            del self._answering[message.number]

    def on_answer(self, message: RpcReply) -> None:
        """Hand an answer over. Whoever asked may have given up; then nobody wants it."""
        question = self._questions.get(message.number)
        if question is not None:
            question.answer = message
            question.done.set()

    def on_withdraw(self, message: RpcCancel) -> None:
        """The other side doesn't wait any more for the answer to that question."""
        scope = self._answering.get(message.number)
        if scope is not None:
            scope.cancel()

    def close(self) -> None:
        """The other side is gone: nobody is answered any more. Idempotent."""
        self._is_closed = True
        for question in self._questions.values():
            question.done.set()
