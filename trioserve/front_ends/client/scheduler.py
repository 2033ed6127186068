"""The scheduler as a front-end process has it: the same calls, and the work is done elsewhere.

Requests go to the engine process, and what it tells of them is told here as the scheduler would
(:mod:`~trioserve.front_ends.client.requests`); tokens go to the detokenizer. The engine process has
the last word on who is admitted. An abort ends a sequence here at once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import attrs
import msgspec
import trio

from trioserve._util.channels import all_waiting
from trioserve._util.exception_groups import sole_exception
from trioserve._util.pair_socket import PairSocket, SocketFailed
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
    packed,
)
from trioserve.front_ends.rpc import Handlers, RpcPeer
from trioserve.front_ends.wire_errors import error_of
from trioserve.observability.scheduler_statistics import SchedulerStatistics
from trioserve.protocol.errors import EngineError, InvalidRequest
from trioserve.protocol.grammar import Grammar
from trioserve.requests.adapters import Catalogue
from trioserve.requests.request import Finish, Request, Sequence, SequenceOutput, State

TAKEN_TOGETHER = 2
"""Updates that are taken before the engine process is told: a message costs both sides more than
what it says."""


class RemoteScheduler:
    """A :class:`~trioserve.engine.backend.Backend` whose scheduler is in the engine process.

    Args:
        socket: connected to it.
        handlers: what that process may ask of this one.
        on_drain: called when no new requests are to be admitted any more.
        on_stop: called when this process is to leave.
        alive_interval: seconds between two signs of life; infinity for none.
    """

    def __init__(
        self,
        socket: PairSocket,
        handlers: Handlers,
        *,
        on_drain: Callable[[], None],
        on_stop: Callable[[], None],
        alive_interval: float = math.inf,
    ) -> None:
        self._socket = socket
        self._alive_interval = alive_interval
        self._on_drain, self._on_stop = on_drain, on_stop
        self.is_dismissed = False
        """Whether the engine process has failed, and said its last word."""
        self._clock = SharedClock.now()
        self._undelivered: deque[list[SequenceOutput] | None] = deque()
        """What the detokenizer is to have; None behind all that came in one update."""
        self._delivery = trio.Event()
        """There may be something for it."""
        self._num_taken = 0
        """Updates that it has taken, and the engine process hasn't been told of."""
        self._outbox: deque[bytes] = deque()
        self._aborted: list[int] = []
        """Sequences to be aborted over there, once the outbox is empty."""
        self._work = trio.Event()
        """There may be something to send."""
        self._sent = SentRequests(self._clock)
        self._line = (0, 0)
        self.state = EngineState(
            attached=True,
            stalled=False,
            paused=False,
            memory_released=False,
            worker_restarts=0,
            scheduler=SchedulerStatistics(),
        )
        """What the engine process answered when it was asked last."""
        gone = EngineError("the engine process is gone")
        self.rpc = RpcPeer(self.tell, handlers, gone)
        """Calls in both directions."""
        self.calls = EngineCalls(self.rpc)
        """The calls that may be made of the engine process."""
        self.catalogue = Catalogue()
        """The adapters that requests may name."""
        self.on_turn_closed: Callable[[int], None] = lambda _: None
        """Called with the number of a turn whose session was closed."""

    # ---- requests

    async def run(
        self,
        requests: trio.MemoryReceiveChannel[Request],
        outputs: trio.MemorySendChannel[list[SequenceOutput]],
    ) -> None:
        """The task: send requests on until ``requests`` is closed.

        Args:
            requests: tokenized. One that has ended meanwhile is dropped.
            outputs: what they are given, to the detokenizer. If it has no buffer, the engine
                process sends no more than the detokenizer takes.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._hand_over, outputs)
            async for first in requests:
                for request in (first, *all_waiting(requests)):
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
                    prompt_ids=packed(request.prompt_ids),
                    params=params,
                    sampler=attrs.evolve(request.sequences[0].sampler, grammar=None, extra_args={}),
                    arrived=self._clock.shared(request.times.arrived),
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

        A request that nobody has admitted yet is rejected.
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
        # Who is told of aborts mustn't hear of them before they have come.
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
                self._line = message.line
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
        """Ask the engine process how it is: ``state``, and all that is told of it, is new then.

        Raises:
            EngineError: it is gone.
        """
        self.state = await self.calls.state()

    @property
    def attached(self) -> bool:
        """Whether a worker was there."""
        return self.state.attached

    @property
    def stalled(self) -> bool:
        """Whether there was no progress, though there could have been."""
        return self.state.stalled

    @property
    def paused(self) -> bool:
        """Whether nobody was to be computed."""
        return self.state.paused

    @property
    def idle(self) -> bool:
        """Whether nobody of this process is to be computed."""
        return self._sent.idle

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot, of all front ends."""
        return self._line[0]

    @property
    def num_waiting_tokens(self) -> int:
        """Their tokens, prompt and output so far."""
        return self._line[1]

    def waiting_of(self, tenant: str) -> tuple[int, int]:
        """Return zeros: the engine process counts the tenants, and refuses what exceeds a share."""
        return 0, 0

    def statistics(self) -> SchedulerStatistics:
        """The counts of the moment of :meth:`look`."""
        return self.state.scheduler

    def check_integrity(self) -> None:
        """Assert that those are known here, and only those, who are to be computed over there."""
        self._sent.check_integrity()


async def receive_from_engine(socket: PairSocket) -> FromEngine:
    """The next message.

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
    """The name of the parameter that no message can hold; None for something else."""
    for name, value in (("grammar", grammar), ("extra_args", extra_args)):
        try:
            wire_value = msgspec.msgpack.encode(value)
            msgspec.msgpack.decode(wire_value)
        except (TypeError, ValueError, OverflowError, RecursionError):
            return name
    return None
