"""The scheduler as a front-end process has it: the same calls, and the work is done elsewhere.

Requests go to the engine process, and what it tells of them is told here as the scheduler would:
states, times and log-probabilities of prompts are set on the request, tokens go to the detokenizer.
The engine process has the last word on who is admitted. An abort ends a sequence here at once; what
still comes for it is dropped.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import attrs
import msgspec
import trio

from trioserve.adapters import Catalogue
from trioserve.channels import all_waiting
from trioserve.errors import EngineError, InvalidRequest, RequestAborted
from trioserve.front_end.asks import Asks, Handlers
from trioserve.front_end.clock import SharedClock
from trioserve.front_end.faults import error_of
from trioserve.front_end.messages import (
    STATES,
    Abort,
    Alive,
    Answer,
    Ask,
    Drain,
    Failed,
    FromEngine,
    FromFrontEnd,
    Offered,
    Prompt,
    Row,
    Step,
    Stop,
    Submit,
    Taken,
    TurnClosed,
    Update,
    Withdraw,
    decode_from_engine,
    encode,
    entries_of,
    numbers_of,
    packed,
)
from trioserve.grammar import Grammar
from trioserve.groups import sole_exception
from trioserve.logprobs import PromptLogprobs
from trioserve.pair_socket import PairSocket, SocketFailed
from trioserve.request import Finish, Request, Sequence, SequenceOutput, State
from trioserve.scheduler.statistics import SchedulerStatistics

__all__ = ["TAKEN_TOGETHER", "EngineState", "RemoteScheduler"]


TAKEN_TOGETHER = 2
"""Updates that are taken before the engine process is told: a message costs both sides more than
what it says."""


@attrs.frozen(kw_only=True)
class EngineState:
    """How the engine process is: what it answers when it is asked."""

    attached: bool
    stalled: bool
    paused: bool
    memory_released: bool
    worker_restarts: int
    scheduler: SchedulerStatistics


@attrs.define(eq=False)
class RemoteAdapters:
    """:class:`~trioserve.adapters.Adapters` that the engine process keeps, and tells of."""

    _asks: Asks
    catalogue: Catalogue = attrs.field(init=False, factory=Catalogue)

    async def load(self, name: str, path: str) -> None:
        """Have the engine process load one."""
        await self._asks.ask("load_adapter", [name, path])

    async def unload(self, name: str) -> None:
        """Have it unload one."""
        await self._asks.ask("unload_adapter", name)


class RemoteScheduler:
    """A :class:`~trioserve.backend.Backend` whose scheduler is in the engine process.

    Args:
        socket: connected to it.
        handlers: what that process may ask of this one.
        on_drain: called when no new requests are to be admitted any more.
        on_stop: called when this process is to leave.
        alive_interval: seconds between two signs of life; infinity for none.
    """

    quiet = None
    """It is the engine process that pauses."""
    weights = None
    """And that exchanges weights."""
    switch = None
    """And that has a worker."""
    feeds = None
    """And that process tells what happens."""
    holds = None
    """And keeps prefixes, and sessions."""

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
        self._next_number = 0
        self._requests: dict[int, Request] = {}
        """Those that were sent and have neither been admitted nor rejected."""
        self._sequences: dict[int, Sequence] = {}
        """Those that were sent and haven't ended."""
        self._numbers: dict[Sequence, int] = {}
        """The same, the other way round."""
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
        self.asks = Asks(self.tell, handlers, gone)
        """What this process asks of the engine process."""
        self.adapters = RemoteAdapters(self.asks)
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
        number = self._next_number
        params = request.params
        try:
            data = encode(
                Submit(
                    number=number,
                    id=request.id,
                    prompt_ids=packed(request.prompt_ids),
                    params=params,
                    sampler=attrs.evolve(request.sequences[0].sampler, grammar=None, extra_args={}),
                    arrived=self._clock.shared(request.times.arrived),
                    priority=request.priority,
                    cache_salt=request.cache_salt,
                    retention=request.retention,
                    adapter=request.adapter,
                )
            )
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            param = _unsendable(params.grammar, params.extra_args)
            message = f"the request can't be sent to the engine: {error}"
            request.reject(InvalidRequest(message, param=param))
            return
        self._next_number += len(request.sequences)
        self._requests[number] = request
        for sequence in request.sequences:
            if sequence.state is not State.FINISHED:
                self._sequences[number + sequence.index] = sequence
                self._numbers[sequence] = number + sequence.index
            else:
                self._aborted.append(number + sequence.index)
        self._outbox.append(data)
        self._work.set()

    def abort(self, sequence: Sequence, finish: Finish) -> None:
        """End ``sequence`` now, whatever its state. Never blocks; idempotent.

        A request that nobody has admitted yet is rejected.
        """
        if sequence.state is State.FINISHED:
            return
        number = self._let_go(sequence)
        if number is not None:
            self._aborted.append(number)
            self._work.set()
        is_admitted = sequence.state not in (State.CREATED, State.TOKENIZING)
        self._finish(sequence, finish)
        request = sequence.request
        if not is_admitted and request.ended:
            if number is not None:
                self._requests.pop(number - sequence.index, None)
            request.reject(finish.error or RequestAborted("the request was aborted"))
        self._deliver([SequenceOutput(sequence, finish=finish)])

    def _let_go(self, sequence: Sequence) -> int | None:
        """Forget ``sequence``; the number that it had, if it was known over there."""
        number = self._numbers.pop(sequence, None)
        if number is not None:
            del self._sequences[number]
        return number

    def _finish(self, sequence: Sequence, finish: Finish) -> None:
        times = sequence.request.times
        if sequence.last_token is not None:
            times.last_token = max(times.last_token or sequence.last_token, sequence.last_token)
        sequence.finish = finish
        sequence.move_to(State.FINISHED)

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
            self.asks.close()
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
            case Update():
                self._update(message)
            case Ask():
                self.asks.on_ask(message, nursery)
            case Answer():
                self.asks.on_answer(message)
            case Withdraw():
                self.asks.on_withdraw(message)
            case Failed():
                self.is_dismissed = True
                raise error_of(message.fault)
            case Offered():
                self.adapters.catalogue.replace(message.adapters)
            case TurnClosed():
                self.on_turn_closed(message.number)
            case Drain():
                self._on_drain()
            case Stop():
                self._on_stop()
            case _:
                raise EngineError(f"the engine process sent {type(message).__name__}")

    # ---- what it tells

    def _update(self, update: Update) -> None:
        self._line = update.line
        for number, queued in update.admitted:
            self._admit(number, self._clock.own(queued))
        for number, fault in update.rejected:
            self._reject(number, error_of(fault))
        for number, place in update.moves:
            sequence = self._sequences.get(number)
            if sequence is not None:
                sequence.move_to(STATES[place])
        for number, time, num_cached in update.scheduled:
            sequence = self._sequences.get(number)
            if sequence is not None:
                request = sequence.request
                request.times.first_scheduled = self._clock.own(time)
                request.num_cached_tokens = num_cached
        for prompt in update.prompts:
            self._take_prompt(prompt)
        if update.step is not None:
            self._deliver(self._outputs_of(update.step))
            self._deliver(None)

    def _admit(self, number: int, queued: float) -> None:
        request = self._requests.pop(number, None)
        if request is None:
            return
        request.times.queued = queued
        for sequence in request.sequences:
            if sequence.state is not State.FINISHED:
                sequence.move_to(State.WAITING)
        request.admit()

    def _reject(self, number: int, error: Exception) -> None:
        request = self._requests.pop(number, None)
        if request is not None:
            for sequence in request.sequences:
                self._let_go(sequence)
            request.reject(error)

    def _take_prompt(self, prompt: Prompt) -> None:
        sequence = self._sequences.get(prompt.number)
        if sequence is not None:
            logprobs = PromptLogprobs(prompt.start, prompt.num_top, prompt.token_ids)
            for piece in prompt.pieces:
                logprobs.add(piece)
            sequence.request.prompt_logprobs = logprobs

    def _outputs_of(self, step: Step) -> list[SequenceOutput]:
        """What a step gave to those that haven't ended here."""
        now = self._clock.own(step.time)
        outputs: list[SequenceOutput] = []
        find = self._sequences.get
        # This is done for every token.
        for number, token in zip(numbers_of(step.numbers), numbers_of(step.tokens), strict=True):
            sequence = find(number)
            if sequence is not None:
                sequence.output_ids.append(token)
                if sequence.last_token is None:
                    _note_first(sequence, now)
                sequence.last_token = now
                outputs.append(SequenceOutput(sequence, (token,)))
        for row in step.rows:
            sequence = find(row.number)
            if sequence is not None:
                outputs.append(self._output_of(sequence, row, now))
        return outputs

    def _output_of(self, sequence: Sequence, row: Row, now: float) -> SequenceOutput:
        if row.tokens:
            sequence.output_ids += row.tokens
            if sequence.last_token is None:
                _note_first(sequence, now)
            sequence.last_token = now
        logprobs = None if row.logprobs is None else entries_of(row.logprobs)
        finish: Finish | None = None
        if (ending := row.ending) is not None:
            finish = ending.finish(None if ending.fault is None else error_of(ending.fault))
            if ending.first_token is not None:
                sequence.request.times.first_token = self._clock.own(ending.first_token)
            if ending.last_token is not None:
                sequence.last_token = self._clock.own(ending.last_token)
            sequence.request.vector = ending.vector
            self._let_go(sequence)
            self._finish(sequence, finish)
        return SequenceOutput(sequence, row.tokens, logprobs, finish)

    # ---- what can be seen from outside

    async def call(self, name: str, arguments: object = None) -> Any:
        """Have the worker do something rare and slow, by name. The deadline is the caller's.

        Raises:
            EngineError: the worker says why it can't.
            WorkerLost: there is no worker, or it was lost before it answered.
        """
        return await self.asks.ask("call", [name, arguments])

    async def look(self) -> None:
        """Ask the engine process how it is: ``state``, and all that is told of it, is new then.

        Raises:
            EngineError: it is gone.
        """
        self.state = msgspec.convert(await self.asks.ask("state"), EngineState)

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
        return not self._sequences

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot, of all front ends."""
        return self._line[0]

    @property
    def num_waiting_tokens(self) -> int:
        """Their tokens, prompt and output so far."""
        return self._line[1]

    def statistics(self) -> SchedulerStatistics:
        """The counts of the moment of :meth:`look`."""
        return self.state.scheduler

    def check_integrity(self) -> None:
        """Assert that those are known here, and only those, who are to be computed over there."""
        assert self._sequences == {number: each for each, number in self._numbers.items()}
        sent = {number - sequence.index for number, sequence in self._sequences.items()}
        assert self._requests.keys() <= sent
        for number, sequence in self._sequences.items():
            assert sequence.state is not State.FINISHED
            is_admitted = sequence.request.admitted.is_set()
            assert is_admitted != (number - sequence.index in self._requests)


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


def _note_first(sequence: Sequence, now: float) -> None:
    """``sequence`` has got its first token."""
    times = sequence.request.times
    if times.first_token is None:
        times.first_token = now


def _unsendable(grammar: Grammar | None, extra_args: dict[str, Any]) -> str | None:
    """The name of the parameter that no message can hold; None for something else."""
    for name, value in (("grammar", grammar), ("extra_args", extra_args)):
        try:
            wire_value = msgspec.msgpack.encode(value)
            msgspec.msgpack.decode(wire_value)
        except (TypeError, ValueError, OverflowError, RecursionError):
            return name
    return None
