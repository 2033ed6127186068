"""The message loop of a fake worker."""

from __future__ import annotations

from collections import deque
from typing import TypeGuard

import attrs
import msgspec
import trio

from trioserve._util.exception_groups import sole_exception
from trioserve.protocol import wire
from trioserve.protocol.errors import WorkerLost
from trioserve.testing.fake_faults import WorkerDies
from trioserve.testing.fake_worker import FakeWorker
from trioserve.testing.memory_link import MemoryLink


async def serve_fake(worker: FakeWorker, link: MemoryLink) -> None:
    """Answer messages in order until ``Quit`` comes, the worker dies or the link is closed.

    Then close the link, so the engine notices. Plans run one after the other; each takes
    ``worker.step_time``.
    """
    try:
        async with trio.open_nursery() as nursery:
            await _answer_messages(worker, link, nursery)
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        error = sole_exception(group)
        if not isinstance(error, (WorkerLost, WorkerDies)):
            raise error from None
    finally:
        link.close()


async def _answer_messages(worker: FakeWorker, link: MemoryLink, nursery: trio.Nursery) -> None:
    ahead: deque[wire.Message] = deque()
    late = _LateAnswers(worker, link)
    while True:
        match ahead.popleft() if ahead else await link.receive():
            case wire.Plan() as plan:
                behind = [*ahead, *link.receive_waiting()]
                ahead.clear()
                for message in behind:
                    if isinstance(message, wire.Drop):
                        worker.drop(message)
                    elif _overtakes(message, plan) and not worker.calls_in_turn:
                        # It may read the pages before the plan changes any.
                        nursery.start_soon(late.answer, message, worker.answer(message))
                    else:
                        ahead.append(message)
                answer = worker.step(plan)
                await trio.sleep(worker.seconds_for(plan))
                await link.send(answer)
            case wire.Drop() as drop:
                worker.drop(drop)
            case wire.Reset() as reset:
                await late.end_transfers()
                worker.reset(reset)
            case wire.Call(name="delete_pages" | "swap_weights") as call:
                await late.end_transfers()
                await trio.sleep(worker.seconds_for_call(call))
                await link.send(worker.answer(call))
            case wire.Call() as call if worker.calls_in_turn:
                await trio.sleep(worker.seconds_for_call(call))
                await link.send(worker.answer(call))
            case wire.Call() as call if worker.seconds_for_call(call):
                nursery.start_soon(late.answer, call)
            case wire.Call() as call:
                await link.send(worker.answer(call))
            case wire.Quit():
                return
            case message:
                raise AssertionError(f"a worker got {type(message).__name__}")


def _overtakes(message: wire.Message, plan: wire.Plan) -> TypeGuard[wire.Call]:
    """Return True for an export of pages that earlier plans compute."""
    if not isinstance(message, wire.Call) or message.name != "export_pages":
        return False
    return bool(msgspec.msgpack.decode(message.arguments)["plan"] < plan.number)


@attrs.define(eq=False)
class _LateAnswers:
    """The answers of calls that steps don't wait for."""

    _worker: FakeWorker
    _link: MemoryLink
    _transfers: dict[trio.Event, trio.Event] = attrs.field(init=False, factory=dict)
    """Events that end each transfer of pages at once, and that tell its end."""

    async def answer(self, call: wire.Call, reply: wire.Reply | None = None) -> None:
        """Answer a call after its time, with ``reply`` if that is known."""
        if not call.name.endswith("_pages"):
            await trio.sleep(self._worker.seconds_for_call(call))
            await self._link.send(self._worker.answer(call))
            return
        hurry, ended = trio.Event(), trio.Event()
        self._transfers[hurry] = ended
        with trio.move_on_after(self._worker.seconds_for_call(call)):
            await hurry.wait()
        await self._link.send(reply or self._worker.answer(call))
        del self._transfers[hurry]
        ended.set()

    async def end_transfers(self) -> None:
        """End all transfers of pages, as a worker does before its pages are used anew."""
        for hurry, ended in list(self._transfers.items()):
            hurry.set()
            await ended.wait()
