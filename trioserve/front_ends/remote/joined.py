"""The front ends of other hosts, as the engine process has them.

Each has a session like a front end of this host. It isn't started or replaced here: it joins, and
joins again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import attrs
import trio

from trioserve._util.exception_groups import sole_exception
from trioserve.front_ends.messages import (
    Drain,
    Failed,
    FrontEndListening,
    FrontEndStart,
    Stop,
    encode,
    messages_hash,
)
from trioserve.front_ends.remote.link_socket import LinkSocket
from trioserve.front_ends.server.engine_server import EngineServer
from trioserve.front_ends.server.session import (
    START_TIMEOUT,
    STOP_GRACE,
    FrontEndSession,
    log_loss,
    receive_from_front_end,
)
from trioserve.front_ends.wire_errors import fault_of
from trioserve.observability.logs import get_logger
from trioserve.protocol.errors import EngineError, FrontEndLost, TrioserveError
from trioserve.protocol.joining import Join
from trioserve.workers.remote.link import RemoteLink

MAX_FRONT_ENDS = 1024
"""Most front ends of other hosts."""

_log = get_logger("trioserve.front_end")


@attrs.define(eq=False)
class JoinedFrontEnds:
    """The front ends that join at the port of workers. Those that come early wait."""

    num_cut: int = attrs.field(init=False, default=0)
    """Requests that were cut off while the server ended."""
    _links: dict[str, RemoteLink] = attrs.field(init=False, factory=dict)
    """The newest link of each, by its process's name."""
    _indexes: set[int] = attrs.field(init=False, factory=set)
    """Numbers that front ends have."""
    _accepting: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    """Cancelled when the server ends."""
    _arrived: trio.MemorySendChannel[tuple[Join, RemoteLink]] = attrs.field(init=False)
    _inbox: trio.MemoryReceiveChannel[tuple[Join, RemoteLink]] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._arrived, self._inbox = trio.open_memory_channel[tuple[Join, RemoteLink]](math.inf)

    @property
    def schema(self) -> str:
        """Hash of the messages to and from a front end."""
        return messages_hash()

    def obstacle(self, join: Join) -> str | None:
        """Return the reason why a front end isn't wanted; None if it is."""
        if join.id not in self._links and len(self._links) >= MAX_FRONT_ENDS:
            return f"the engine has {MAX_FRONT_ENDS} front ends of other hosts, which is the limit"
        return None

    def take(self, join: Join, link: RemoteLink) -> None:
        """Take in a front end. An older link of its process, which may be half-open, ends."""
        older = self._links.get(join.id)
        if older is not None:
            older.end("it has joined again")
        self._links[join.id] = link
        self._arrived.send_nowait((join, link))

    def drain(self) -> None:
        """Take in no more front ends."""
        self._accepting.cancel()

    async def serve(
        self,
        engine_server: EngineServer,
        start: Callable[[int], FrontEndStart],
        last_word: Callable[[], Stop | Failed],
    ) -> None:
        """Serve the front ends until :meth:`drain`, and until all have drained. This is a task.

        Args:
            engine_server: Has their sessions.
            start: Returns what the front end with a number is to serve.
            last_word: Returns what each is told at the end.
        """
        async with trio.open_nursery() as nursery:
            with self._accepting:
                while True:
                    join, link = await self._inbox.receive()
                    index = next(each for each in itertools.count() if each not in self._indexes)
                    self._indexes.add(index)
                    hosted = HostedFrontEnd(
                        host=join.host,
                        link=link,
                        start=start(index),
                        engine_server=engine_server,
                        last_word=last_word,
                    )
                    nursery.start_soon(self._serve_one, join.id, index, hosted)

    async def _serve_one(self, id: str, index: int, hosted: HostedFrontEnd) -> None:
        try:
            await hosted.serve(lambda: self._accepting.cancel_called)
        finally:
            if self._accepting.cancel_called:
                self.num_cut += hosted.num_cut
            self._indexes.remove(index)
            if self._links.get(id) is hosted.link:
                del self._links[id]


@attrs.define(eq=False, kw_only=True)
class HostedFrontEnd:
    """One front end of another host, from its start to its end.

    Args:
        host: Its host's name.
        link: Connected to it.
        start: What it serves.
        engine_server: Has its session.
        last_word: Returns what it is told at the end.
    """

    host: str
    link: RemoteLink
    start: FrontEndStart
    engine_server: EngineServer
    last_word: Callable[[], Stop | Failed]
    num_cut: int = attrs.field(init=False, default=0)
    """Requests that were cut off."""
    _peer: FrontEndSession | None = attrs.field(init=False, default=None)

    async def serve(self, is_draining: Callable[[], bool]) -> None:
        """Serve it until it has drained or is lost, which is logged."""
        failure: BaseException | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_raise_loss, self.link)
                await self._talk(is_draining)
                nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            failure = sole_exception(group)
        if failure is not None:
            self.num_cut = 0 if self._peer is None else self._peer.num_lost
        if isinstance(failure, Exception):
            self._note_loss(failure)
        with trio.CancelScope(shield=True):
            await self._end(failure)
        if failure is None:
            _log.info("front end left", front_end=self.start.index, host=self.host)
        elif not isinstance(failure, Exception):
            raise failure

    async def _talk(self, is_draining: Callable[[], bool]) -> None:
        socket = LinkSocket(self.link)
        with trio.move_on_after(START_TIMEOUT) as starting:
            await socket.send(encode(self.start))
            listening = await receive_from_front_end(socket)
        if starting.cancelled_caught:
            raise FrontEndLost(f"it didn't listen within {START_TIMEOUT:g} s of its start")
        if not isinstance(listening, FrontEndListening):
            raise FrontEndLost(f"it sent {type(listening).__name__} before it listened")
        with self.engine_server.at_home(socket) as self._peer:
            _log.info("front end serves", front_end=self.start.index, host=self.host)
            if is_draining():
                self._peer.tell(Drain())
            self.num_cut = await self._peer.run()

    async def _end(self, failure: BaseException | None) -> None:
        """Tell it to leave, and why, and let it close the link."""
        if isinstance(failure, Exception):
            word: Stop | Failed = Failed(fault_of(EngineError(f"the engine gave it up: {failure}")))
        else:
            word = self.last_word()
        with trio.move_on_after(STOP_GRACE):
            await self.link.send_bytes(encode(word))
            await self.link.ended.wait()
        self.link.end("the engine has let it go")

    def _note_loss(self, loss: Exception) -> None:
        self.engine_server.front_end_restarts += 1
        is_own = isinstance(loss, TrioserveError)
        log_loss(
            loss,
            self.start.index,
            self.num_cut,
            host=self.host,
            # Whatever it sends, nothing but its own requests is lost.
            exc_info=None if is_own else loss,
        )


async def _raise_loss(link: RemoteLink) -> None:
    raise FrontEndLost(str(await link.wait_lost()))
