"""The back end of requests in a front end: the engine process computes them.

Requests go to the engine process. Its updates set their states as the scheduler does
(:mod:`~trioserve.front_ends.client.requests`); tokens go to the detokenizer. The engine process
decides on admission. An abort ends a sequence here at once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import attrs
import msgspec
import trio

from trioserve._util.channels import receive_waiting
from trioserve._util.exception_groups import sole_exception
from trioserve._util.pair_socket import MessageSocket, SocketFailed
from trioserve.front_ends.calls import EngineCalls, EngineState
from trioserve.front_ends.client.requests import SentRequests
from trioserve.front_ends.clock import SharedClock
from trioserve.front_ends.messages import (
    Abort,
    Alive,
    Drain,
    Failed,
    FromEngine,
    FromFrontEnd,
    Offered,
    RpcCall,
    RpcCancel,
    RpcReply,
    SchedulerUpdate,
    Stop,
    Submit,
    Taken,
    TurnClosed,
    decode_from_engine,
    encode,
)
from trioserve.front_ends.rpc import Handlers, RpcPeer
from trioserve.front_ends.wire_errors import error_of
from trioserve.observability.scheduler_statistics import SchedulerStatistics
from trioserve.protocol.errors import EngineError, InvalidRequest
from trioserve.protocol.grammar import Grammar
from trioserve.protocol.wire import Ready
from trioserve.requests.adapters import Catalogue
from trioserve.requests.request import Finish, Request, Sequence, SequenceOutput, State

TAKEN_TOGETHER = 2
"""Updates that are taken before the engine process is told, so that there are fewer messages."""


class RemoteScheduler:
    """A :class:`~trioserve.engine.backend.Backend` with its scheduler in the engine process.

    Args:
        socket: connected to it.
        handlers: answer that process's calls of this one.
        clock: translates that process's times.
        ready: tells what its workers are.
        on_drain: called when no new requests are to be admitted any more.
        on_stop: called when this process is to leave.
        alive_interval: seconds between two signs of life; infinity for none.
    """

    def __init__(
        self,
        socket: MessageSocket,
        handlers: Handlers,
        *,
        clock: SharedClock,
        ready: Ready,
        on_drain: Callable[[], None],
        on_stop: Callable[[], None],
        alive_interval: float = math.inf,
    ) -> None:
        self._socket = socket
        self._alive_interval = alive_interval
        self._on_drain, self._on_stop = on_drain, on_stop
        self.is_dismissed = False
        """True once the engine process has failed, and sent its last message."""
        self.clock = clock
        self._undelivered: deque[list[SequenceOutput] | None] = deque()
        """Outputs for the detokenizer; None behind those of one update."""
        self._delivery = trio.Event()
        """Set when there may be outputs for it."""
        self._num_taken = 0
        """Updates that the detokenizer has taken since the engine process was told."""
        self._outbox: deque[bytes] = deque()
        self._aborted: list[int] = []
        """Sequences to be aborted over there, once the outbox is empty."""
        self._work = trio.Event()
        """There may be something to send."""
        self._sent = SentRequests(clock, ready)
        self._queue_load = (0, 0)
        self.state = EngineState(
            attached=True,
            stalled=False,
            paused=False,
            memory_released=False,
            worker_restarts=0,
            scheduler=SchedulerStatistics(),
        )
        """The last known state of the engine process."""
        gone = EngineError("the engine process is gone")
        self.rpc = RpcPeer(self.tell, handlers, gone)
        """Calls in both directions."""
        self.calls = EngineCalls(self.rpc)
        """The calls that may be made of the engine process."""
        self.catalogue = Catalogue()
        """The adapters that requests may name."""
        self.on_turn_closed: Callable[[int], None] = lambda _: None
        """Called with the number of a turn when its session was closed."""

    # ---- requests

    async def run(
        self,
        requests: trio.MemoryReceiveChannel[Request],
        outputs: trio.MemorySendChannel[list[SequenceOutput]],
    ) -> None:
        """Send requests on until ``requests`` is closed. This is a task.

        Args:
            requests: tokenized. One that has ended meanwhile is dropped.
            outputs: their outputs, to the detokenizer. If it has no buffer, the engine process
                sends no more than the detokenizer takes.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._hand_over, outputs)
            async for first in requests:
                for request in (first, *receive_waiting(requests)):
                    if not request.ended:
                        self._submit(request)
            nursery.cancel_scope.cancel()

    async def _hand_over(self, outputs: trio.MemorySendChannel[list[SequenceOutput]]) -> None:
        while True:
            while self._undelivered:
                batch = self._undelivered.popleft()
                if batch is None:
                    self._num_taken += 1
                    if self._num_taken == TAKEN_TOGETHER:
                        self._num_taken = 0
                        self.tell(Taken(TAKEN_TOGETHER))
                else:
                    await outputs.send(batch)
            self._delivery = trio.Event()
            await self._delivery.wait()

    def _submit(self, request: Request) -> None:
        params = request.params
        try:
            data = encode(
                Submit(
                    number=self._sent.next_number,
                    id=request.id,
                    prompt_column=request.prompt_column(),
                    embedded=request.embedded,
                    params=params,
                    sampler=attrs.evolve(request.sequences[0].sampler, grammar=None, extra_args={}),
                    arrived=self.clock.shared(request.times.arrived),
                    priority=request.priority,
                    cache_salt=request.cache_salt,
                    tenant=request.tenant,
                    retention=request.retention,
                    adapter=request.adapter,
                    default_max_tokens=request.default_max_tokens,
                )
            )
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            param = _unsendable(params.grammar, params.extra_args)
            message = f"the request can't be sent to the engine: {error}"
            request.reject(InvalidRequest(message, param=param))
            return
        self._aborted += self._sent.add(request)
        self._outbox.append(data)
        self._work.set()

    def abort(self, sequence: Sequence, finish: Finish) -> None:
        """End ``sequence`` now, whatever its state. Never blocks; idempotent.

        A request that isn't admitted yet is rejected.
        """
        if sequence.state is State.FINISHED:
            return
        number = self._sent.abort(sequence, finish)
        if number is not None:
            self._aborted.append(number)
            self._work.set()
        self._deliver([SequenceOutput(sequence, finish=finish)])

    def _deliver(self, outputs: list[SequenceOutput] | None) -> None:
        self._undelivered.append(outputs)
        self._delivery.set()

    # ---- the engine process

    async def attach(self) -> None:
        """Talk to the engine process until cancelled.

        Raises:
            EngineError: it has failed, or is gone.
        """
        failure: BaseException | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send)
                nursery.start_soon(self._receive, nursery)
                nursery.start_soon(self._say_alive)
        except BaseExceptionGroup as group:
            failure = sole_exception(group)
        finally:
            self.rpc.close()
        if failure is not None:
            raise failure

    def tell(self, message: FromFrontEnd) -> None:
        """Send a message behind those that wait to be sent."""
        # Aborts come before a message that may refer to them.
        self._put_aborts()
        self._outbox.append(encode(message))
        self._work.set()

    async def _say_alive(self) -> None:
        while True:
            await trio.sleep(self._alive_interval)
            self.tell(Alive())

    def _put_aborts(self) -> None:
        if self._aborted:
            self._outbox.append(encode(Abort(self._aborted)))
            self._aborted = []

    @trio.lowlevel.enable_ki_protection
    async def _send(self) -> None:
        while True:
            if not self._outbox:
                self._put_aborts()
            if not self._outbox:
                self._work = trio.Event()
                await self._work.wait()
                continue
            try:
                await self._socket.send(self._outbox.popleft())
            except SocketFailed as error:
                raise EngineError(f"the engine process can't be reached: {error}") from error

    @trio.lowlevel.enable_ki_protection
    async def _receive(self, nursery: trio.Nursery) -> None:
        while True:
            self._take(await receive_from_engine(self._socket), nursery)

    def _take(self, message: FromEngine, nursery: trio.Nursery) -> None:
        match message:
            case SchedulerUpdate():
                self._queue_load = message.queue
                outputs = self._sent.take(message)
                if outputs is not None:
                    self._deliver(outputs)
                    self._deliver(None)
            case RpcCall():
                self.rpc.on_ask(message, nursery)
            case RpcReply():
                self.rpc.on_answer(message)
            case RpcCancel():
                self.rpc.on_withdraw(message)
            case Failed():
                self.is_dismissed = True
                raise error_of(message.fault)
            case Offered():
                self.catalogue.replace(message.adapters)
            case TurnClosed():
                self.on_turn_closed(message.number)
            case Drain():
                self._on_drain()
            case Stop():
                self._on_stop()
            case _:
                raise EngineError(f"the engine process sent {type(message).__name__}")

    # ---- what can be seen from outside

    async def call(self, name: str, arguments: object = None) -> Any:
        """Have the worker do something rare and slow, by name. The deadline is the caller's.

        Raises:
            EngineError: the worker says why it can't.
            WorkerLost: there is no worker, or it was lost before it answered.
        """
        return await self.calls.call_worker(name, arguments)

    async def look(self) -> None:
        """Ask the engine process for its state, and set :attr:`state`.

        Raises:
            EngineError: it is gone.
        """
        self.state = await self.calls.state()

    @property
    def attached(self) -> bool:
        """True if a worker was attached."""
        return self.state.attached

    @property
    def stalled(self) -> bool:
        """True if there was no progress, though there could have been."""
        return self.state.stalled

    @property
    def paused(self) -> bool:
        """True if the engine was paused."""
        return self.state.paused

    @property
    def idle(self) -> bool:
        """True if no request of this process is to be computed."""
        return self._sent.idle

    @property
    def num_requests(self) -> int:
        """The number of requests of this process that are to be computed."""
        return self._sent.num_requests

    @property
    def num_waiting(self) -> int:
        """The number of sequences that wait for a slot, of all front ends."""
        return self._queue_load[0]

    @property
    def num_waiting_tokens(self) -> int:
        """The tokens of waiting sequences, prompt and output so far."""
        return self._queue_load[1]

    def waiting_of(self, tenant: str) -> tuple[int, int]:
        """Return zeros: the engine process counts the tenants, and refuses what exceeds a share."""
        return 0, 0

    def statistics(self) -> SchedulerStatistics:
        """Return the counts of the last :meth:`look`."""
        return self.state.scheduler

    def check_integrity(self) -> None:
        """Assert that exactly the sequences are known here that the engine process computes."""
        self._sent.check_integrity()


async def receive_from_engine(socket: MessageSocket) -> FromEngine:
    """Return the next message.

    Raises:
        EngineError: the engine process can't be understood.
    """
    try:
        return decode_from_engine(await socket.receive())
    except SocketFailed as error:
        raise EngineError(f"the engine process can't be reached: {error}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EngineError(f"the engine process sent nonsense: {error}") from error


def _unsendable(grammar: Grammar | None, extra_args: dict[str, Any]) -> str | None:
    """Return the name of the parameter that no message can hold; None for something else."""
    for name, value in (("grammar", grammar), ("extra_args", extra_args)):
        try:
            wire_value = msgspec.msgpack.encode(value)
            msgspec.msgpack.decode(wire_value)
        except (TypeError, ValueError, OverflowError, RecursionError):
            return name
    return None
