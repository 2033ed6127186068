"""A link to another host, as both ends have it: messages, heartbeats, and the link's loss.

All loss is found here or told to :meth:`RemoteLink.end`: a closed connection, an invalid message,
and silence, which is all that a cut or half-open network gives.
"""

from __future__ import annotations

import time
from collections import deque

import attrs
import trio

from trioserve._util.pair_socket import PairSocket, SocketFailed
from trioserve.protocol import wire
from trioserve.protocol.errors import WorkerLost
from trioserve.protocol.joining import JoinRefusal, LinkHeartbeat, WorkerEnd
from trioserve.workers.link import LinkTraffic
from trioserve.workers.remote.silence import FIRST_TIMEOUT, Silence

REFUSAL_GRACE = 1.0
"""Seconds for the other end to close the connection after it was refused."""
CLOCK_SAMPLES = 16
"""Answers to heartbeats of which the quickest tells the other system's clock."""


@attrs.define(eq=False)
class PeerClock:
    """The clock of the system at the other end, by the answers to heartbeats."""

    is_known: trio.Event = attrs.field(init=False, factory=trio.Event)
    """Set once there was an answer."""
    _samples: deque[tuple[float, float]] = attrs.field(
        init=False, factory=lambda: deque(maxlen=CLOCK_SAMPLES)
    )
    """The newest round trips, each with the offset that it gives."""
    offset: float = attrs.field(init=False, default=0.0)
    """Seconds by which trio's clock is ahead; wrong by half of a round trip at most."""

    def note(self, sent: float, received: float, told: float) -> None:
        """Note that a heartbeat was answered at ``told``, somewhere between two of trio's times."""
        self._samples.append((received - sent, (sent + received) / 2 - told))
        self.offset = min(self._samples)[1]
        self.is_known.set()


@attrs.define(eq=False)
class RemoteLink:
    """One end of a link to another host, as :class:`trioserve.workers.Link` describes it.

    A lost link blocks whatever is sent or received: its owner waits for :attr:`ended`.
    """

    socket: PairSocket
    traffic: LinkTraffic = attrs.field(factory=LinkTraffic)
    ended: trio.Event = attrs.field(init=False, factory=trio.Event)
    """Set once the link is lost or was closed."""
    loss: WorkerLost | None = attrs.field(init=False, default=None)
    """Why it is lost."""
    clock: PeerClock = attrs.field(init=False, factory=PeerClock)
    silence: Silence = attrs.field(init=False)
    _arrived: trio.MemorySendChannel[bytes] = attrs.field(init=False)
    _incoming: trio.MemoryReceiveChannel[bytes] = attrs.field(init=False)
    leaves: bool = attrs.field(init=False, default=False)
    """True if the agent at the other end has said that it ends."""
    _agreement: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    """Scope of the tasks that go by the time of silence."""
    _number: int = attrs.field(init=False, default=0)
    """Number of the last heartbeat."""
    _beat_at: float = attrs.field(init=False, default=0.0)
    """Time when it was sent."""

    def __attrs_post_init__(self) -> None:
        self.silence = Silence(FIRST_TIMEOUT, trio.current_time())
        self._arrived, self._incoming = trio.open_memory_channel[bytes](wire.BUFFERED_MESSAGES)

    async def run(self) -> None:
        """Receive messages, and send heartbeats, until the link has ended. This is a task."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._read)
            nursery.start_soon(self._beat_and_watch)
            await self.ended.wait()
            nursery.cancel_scope.cancel()

    def end(self, reason: str, *, kind: str = "unreachable", from_outside: bool = True) -> None:
        """End the link. Only the first reason counts; ``kind`` is that of the loss."""
        if self.loss is None:
            self.loss = WorkerLost(reason, from_outside=from_outside, reason=kind)
            self.ended.set()

    def agree(self, timeout: float) -> None:
        """Count the link as lost after ``timeout`` seconds of silence from now on."""
        self.silence.timeout = timeout
        self._agreement.cancel()

    async def wait_lost(self) -> WorkerLost:
        """Block until the link has ended; return why."""
        await self.ended.wait()
        assert self.loss is not None
        return self.loss

    # ---- messages

    async def send(self, message: wire.Message) -> None:
        """Send ``message``; block while too many wait to be sent."""
        data = wire.encode(message)
        self.traffic.count(message, data)
        await self.send_bytes(data)

    async def send_bytes(self, data: bytes) -> None:
        """Send an encoded message as :meth:`send`."""
        try:
            await self.socket.send(data)
        except SocketFailed as error:
            self.end(f"the link failed: {error}")
            await trio.sleep_forever()

    async def receive_bytes(self) -> bytes:
        """Return the next message that is no heartbeat, as it came."""
        return await self._incoming.receive()

    async def receive(self) -> wire.Message:
        """Return the next message. The link ends by an invalid one, or if it tells the end."""
        try:
            message = wire.decode(await self.receive_bytes())
        except wire.WireError as error:
            self.end(f"it sent an invalid message: {error}", kind="failed", from_outside=False)
        else:
            if not isinstance(message, WorkerEnd):
                return message
            self.leaves = message.leaves
            self.end(message.reason, kind="crashed", from_outside=message.from_outside)
        await trio.sleep_forever()
        raise AssertionError

    async def refuse(self, reason: str, *, final: bool) -> None:
        """Tell the other end that it is refused; end the link once it has closed it."""
        with trio.move_on_after(REFUSAL_GRACE):
            await self.send(JoinRefusal(reason=reason, final=final))
            await self.ended.wait()
        self.end(reason)

    # ---- tasks

    async def _read(self) -> None:
        while True:
            try:
                data = await self.socket.receive()
            except SocketFailed as error:
                self.end(f"the link failed: {error}")
                return
            now = trio.current_time()
            self.silence.hear(now)
            if wire.has_tag(data, LinkHeartbeat):
                self._take_heartbeat(data, now)
            else:
                await self._arrived.send(data)

    def _take_heartbeat(self, data: bytes, now: float) -> None:
        try:
            beat = wire.decode(data)
        except wire.WireError as error:
            self.end(f"it sent an invalid message: {error}", kind="failed", from_outside=False)
            return
        assert isinstance(beat, LinkHeartbeat)
        if not beat.is_answer:
            answer = attrs.evolve(beat, is_answer=True, time=time.perf_counter())
            self.socket.send_nowait(wire.encode(answer))
        elif beat.number == self._number:
            self.traffic.round_trip = now - self._beat_at
            self.clock.note(self._beat_at, now, beat.time)

    async def _beat_and_watch(self) -> None:
        """Send heartbeats and watch for them; begin anew at each :meth:`agree`."""
        while True:
            with trio.CancelScope() as self._agreement:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._beat)
                    nursery.start_soon(self._watch)

    async def _beat(self) -> None:
        while True:
            self._number += 1
            self._beat_at = trio.current_time()
            # If too much waits to be sent, that is a sign of life, too.
            self.socket.send_nowait(wire.encode(LinkHeartbeat(number=self._number)))
            await trio.sleep(self.silence.interval)

    async def _watch(self) -> None:
        while True:
            await trio.sleep_until(self.silence.deadline)
            if self.silence.is_over(trio.current_time()):
                break
        self.end(f"nothing was heard of it for {self.silence.timeout:g} s")
