"""Links that take time, and that are slow or cut for a while, as between hosts."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Awaitable, Callable

import attrs
import trio

from trioserve.protocol import wire
from trioserve.protocol.errors import WorkerLost
from trioserve.testing.simulation.scenario import Fault, Member
from trioserve.workers import Link

SLOW_LINK = 0.3
"""Seconds that a message takes more while its link is slow."""

_Timed = tuple[float, wire.Message]
"""A message, and the time when it was sent."""
_Deliver = Callable[[wire.Message], Awaitable[None]]


@attrs.define(eq=False)
class NetworkLink:
    """The engine's end of a link to another host, while :meth:`run` runs.

    Messages arrive in order, and many are on their way at a time. While the link is cut none
    arrives, in either direction; later all do, as over TCP.

    Args:
        link: The link itself, which takes no time.
        member: The worker's properties.
        faults: The link's faults.
    """

    _link: Link
    _member: Member
    _faults: list[Fault]
    _opened_at: float = attrs.field(init=False, factory=trio.current_time)
    _to_worker: trio.MemorySendChannel[_Timed] = attrs.field(init=False)
    _sent: trio.MemoryReceiveChannel[_Timed] = attrs.field(init=False)
    _to_engine: trio.MemorySendChannel[_Timed] = attrs.field(init=False)
    _answered: trio.MemoryReceiveChannel[_Timed] = attrs.field(init=False)
    _arrivals: trio.MemorySendChannel[wire.Message] = attrs.field(init=False)
    _arrived: trio.MemoryReceiveChannel[wire.Message] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._to_worker, self._sent = trio.open_memory_channel[_Timed](math.inf)
        self._to_engine, self._answered = trio.open_memory_channel[_Timed](math.inf)
        self._arrivals, self._arrived = trio.open_memory_channel[wire.Message](math.inf)

    async def run(self) -> None:
        """Carry messages until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._carry, self._sent, self._link.send)
            nursery.start_soon(self._take_answers)
            nursery.start_soon(self._carry_answers)

    async def send(self, message: wire.Message) -> None:
        """Send ``message``, which arrives later."""
        await trio.lowlevel.checkpoint()
        self._to_worker.send_nowait((trio.current_time(), message))

    async def receive(self) -> wire.Message:
        """Return the next message that has arrived."""
        try:
            return await self._arrived.receive()
        except trio.EndOfChannel:
            raise WorkerLost("the link is closed") from None

    async def _take_answers(self) -> None:
        with self._to_engine, contextlib.suppress(WorkerLost):
            while True:
                message = await self._link.receive()
                if isinstance(message, wire.StepResult):
                    measured = round(message.step_us * self._member.clock_rate)
                    message = attrs.evolve(message, step_us=measured)
                self._to_engine.send_nowait((trio.current_time(), message))

    async def _carry_answers(self) -> None:
        with self._arrivals:
            await self._carry(self._answered, self._arrivals.send)

    async def _carry(self, messages: trio.MemoryReceiveChannel[_Timed], deliver: _Deliver) -> None:
        with contextlib.suppress(WorkerLost):
            async for sent_at, message in messages:
                await trio.sleep_until(self._arrival(sent_at))
                await deliver(message)

    def _arrival(self, sent_at: float) -> float:
        """Return the time at which a message arrives that was sent at ``sent_at``."""
        delay = self._member.link_delay
        cuts = []
        for fault in self._faults:
            begin = self._opened_at + fault.at
            end = begin + fault.seconds
            if fault.what == "cut":
                cuts.append((begin, end))
            elif begin <= sent_at < end:
                delay += SLOW_LINK
        arrival = sent_at + delay
        for begin, end in sorted(cuts):
            if sent_at < end and begin <= arrival:
                arrival = max(arrival, end + delay)
        return arrival
