"""A front end as the engine process has it: the messages in both directions.

The updates for its requests are collected in :mod:`~trioserve.front_ends.server.requests`.
"""

from __future__ import annotations

import msgspec
import trio

from trioserve._util.exception_groups import sole_exception
from trioserve._util.pair_socket import MessageSocket, SocketFailed
from trioserve.front_ends.calls import Counted, EngineCalls, FrontEndCalls
from trioserve.front_ends.heartbeat import Heartbeat
from trioserve.front_ends.messages import (
    Abort,
    Alive,
    Drained,
    EndSubscription,
    Failed,
    FromEngine,
    FromFrontEnd,
    LeaveTurn,
    ReturnPermit,
    RpcCall,
    RpcCancel,
    RpcReply,
    Submit,
    Taken,
    decode_from_front_end,
    encode,
)
from trioserve.front_ends.rpc import RpcPeer
from trioserve.front_ends.server.context import ServerContext
from trioserve.front_ends.server.permits import FrontEndPermits
from trioserve.front_ends.server.requests import FrontEndRequests, HostedRequest
from trioserve.front_ends.server.subscriptions import FrontEndSubscriptions
from trioserve.front_ends.server.turns import FrontEndTurns
from trioserve.front_ends.wire_errors import error_of
from trioserve.observability.live.schema import TaskNode
from trioserve.observability.logs import get_logger
from trioserve.protocol.errors import FrontEndLost

START_TIMEOUT = 120.0
"""Seconds for a front end to start, read the tokenizer and listen."""
STOP_GRACE = 3.0
"""Seconds for one that was told to leave: its streams get a last event."""

_log = get_logger("trioserve.front_end")


class FrontEndSession:
    """One front end.

    Args:
        socket: connected to it.
        context: the parts of the engine process that all front ends share.
        administration: the handlers of operators' calls.
    """

    def __init__(
        self, socket: MessageSocket, context: ServerContext, administration: object
    ) -> None:
        self._socket = socket
        self._heartbeat = Heartbeat(context.patience)
        self._work = trio.Event()
        """Set when there may be a message to send."""
        self._letters: list[FromEngine] = []
        """Messages that go out before the next update."""
        self.hosted = FrontEndRequests(context, self.wake)
        self.num_lost = 0
        """Requests that were open when it went."""
        self._permits = FrontEndPermits(context.permits, context.max_seats)
        self._turns = FrontEndTurns(context.sessions, self.tell)
        self._watches = FrontEndSubscriptions(context.monitor, context.look_around, context.caches)
        parts = (administration, self._turns, self._watches, self._permits, context.media)
        handlers = EngineCalls.handlers(*parts)
        self.counted = Counted()
        """The last known counts of the front end."""
        self.tasks: TaskNode | None = None
        """The last known tasks of the front end; None until it was asked for them."""
        self.rpc = RpcPeer(self.tell, handlers, FrontEndLost("the front end is gone"))
        """Calls in both directions."""
        self.calls = FrontEndCalls(self.rpc)
        """The calls that may be made of the front end."""

    @property
    def requests(self) -> dict[HostedRequest, None]:
        """Requests for which the front end waits."""
        return self.hosted.requests

    @property
    def num_ended(self) -> int:
        """Requests that aren't open any more."""
        return self.hosted.num_ended

    async def run(self) -> int:
        """Talk to the front end until it has drained.

        Returns:
            how many of its requests were cut off.

        Raises:
            FrontEndLost: it can't be understood, or hangs.
            TrioserveError: it has failed, and why.
        """
        num_cut = 0
        failure: BaseException | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send)
                nursery.start_soon(self._heartbeat.watch)
                num_cut = await self._receive(nursery)
                nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            failure = sole_exception(group)
        finally:
            self._close()
        if failure is not None:
            raise failure
        return num_cut

    def tell(self, message: FromEngine) -> None:
        """Send a message before the next update."""
        self._letters.append(message)
        self.wake()

    def wake(self) -> None:
        """Wake the sender, because there may be a message to send."""
        self._work.set()

    async def _send(self) -> None:
        while True:
            letters, self._letters = self._letters, []
            update = self.hosted.update()
            if not letters and update is None:
                self._work = trio.Event()
                await self._work.wait()
                continue
            try:
                for letter in letters:
                    await self._socket.send(encode(letter))
                if update is not None:
                    await self._socket.send(encode(update))
            except SocketFailed as error:
                raise FrontEndLost(f"the front end can't be reached: {error}") from error

    async def _receive(self, nursery: trio.Nursery) -> int:
        while True:
            message = await receive_from_front_end(self._socket)
            match message:
                case Submit():
                    self.hosted.submit(message)
                case Abort():
                    self.hosted.abort(message.numbers)
                case Taken():
                    self.hosted.taken(message.count)
                case RpcCall():
                    self.rpc.on_ask(message, nursery)
                case RpcReply():
                    self.rpc.on_answer(message)
                case RpcCancel():
                    self.rpc.on_withdraw(message)
                case Alive():
                    self._heartbeat.beat()
                case ReturnPermit():
                    self._permits.leave(message.number)
                case LeaveTurn():
                    self._turns.leave(message.number)
                case EndSubscription():
                    self._watches.leave(message.number)
                case Drained():
                    return message.num_cut
                case _:
                    raise FrontEndLost(f"the front end sent {type(message).__name__}")

    def _close(self) -> None:
        """Drop all that belongs to the front end, which is gone."""
        self.rpc.close()
        self.num_lost = len(self.requests)
        self.hosted.abort_all()
        self._permits.leave_all()
        self._turns.leave_all()
        self._watches.leave_all()


async def receive_from_front_end(socket: MessageSocket) -> FromFrontEnd:
    """Return the next message.

    Raises:
        FrontEndLost: the front end can't be understood.
        TrioserveError: it says that it has failed, and why.
    """
    try:
        message = decode_from_front_end(await socket.receive())
    except SocketFailed as error:
        raise FrontEndLost(f"the front end can't be reached: {error}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrontEndLost(f"the front end sent nonsense: {error}") from error
    if isinstance(message, Failed):
        raise error_of(message.fault)
    return message


def log_loss(loss: Exception, index: int, num_requests: int, **more: object) -> None:
    """Log the loss of the front end of that number, with its open requests and ``more``."""
    _log.warning(
        "front end lost",
        reason=str(loss),
        kind="hung" if isinstance(loss, FrontEndLost) and loss.is_hung else "died",
        front_end=index,
        requests=num_requests,
        **more,
    )
