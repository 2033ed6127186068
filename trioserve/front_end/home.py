"""A front end as the engine process has it: its requests there, and what it is to be told of them.

Whatever the scheduler does with a request is noted here as it happens, by the request itself
(:class:`HostedRequest`, :class:`HostedSequence`), and goes out in one message. While a front end
lags, or is stopped, what steps give piles up here, holds nobody else up, and goes out as if it were
one step. It can't pile up for ever, because what has been admitted is bounded and ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import attrs
import msgspec
import trio

from trioserve.errors import FrontEndLost, Paused, QueueFull
from trioserve.front_end.asks import Asks, Handlers
from trioserve.front_end.clock import SharedClock
from trioserve.front_end.faults import Fault, error_of, fault_of
from trioserve.front_end.hosted_turns import HostedTurns
from trioserve.front_end.hosted_watches import HostedWatches
from trioserve.front_end.merging import merged
from trioserve.front_end.messages import (
    STATES,
    Abort,
    Alive,
    Answer,
    Ask,
    Drained,
    Ending,
    Failed,
    FromEngine,
    FromFrontEnd,
    LeaveSeat,
    LeaveTurn,
    LeaveWatch,
    Prompt,
    Row,
    Step,
    Submit,
    Taken,
    Update,
    Withdraw,
    decode_from_front_end,
    encode,
    numbers_of,
    packed,
    plain_entries,
)
from trioserve.front_end.pulse import Pulse
from trioserve.groups import sole_exception
from trioserve.live import Subject
from trioserve.live.schema import TaskNode
from trioserve.metrics.snapshot import Snapshot
from trioserve.pair_socket import PairSocket, SocketFailed
from trioserve.request import (
    Finish,
    FinishReason,
    Request,
    Sequence,
    SequenceOutput,
    State,
    Times,
    TokensPrompt,
)
from trioserve.sessions import Sessions
from trioserve.stream import Stream, StreamBudget

__all__ = [
    "Counted",
    "Home",
    "HostedRequest",
    "HostedSequence",
    "Hosting",
    "Looked",
    "receive_from_front_end",
]

MAX_UNTAKEN = 3
"""Updates on their way to a front end: one that it works on, the next, and one that was taken and
not told of (:data:`~trioserve.front_end.remote.TAKEN_TOGETHER`)."""

_NO_PROMPT = TokensPrompt(())
"""The ids are all that comes here of a prompt."""
_PLACES = {state: place for place, state in enumerate(STATES)}


class Line(Protocol):
    """What is needed of the :class:`~trioserve.scheduler.Scheduler`."""

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot."""

    @property
    def num_waiting_tokens(self) -> int:
        """Their tokens, prompt and output so far."""

    def abort(self, sequence: Sequence, finish: Finish) -> None:
        """End ``sequence`` now, whatever its state. Never blocks; idempotent."""


@attrs.frozen(kw_only=True)
class Hosting:
    """What all front ends share in the engine process."""

    scheduler: Line
    enter: Callable[[Request], None]
    """Counts a request among those that wait; raises ``QueueFull`` or ``Paused``."""
    forget: Callable[[Request], None]
    """A request that was counted is over."""
    submit: Callable[[Request], None]
    """Takes a request in, behind those that came before."""
    clock: SharedClock
    on_line: Callable[[], None]
    """Called when somebody may have joined the line, or left it."""
    seats: Counter[str]
    """Requests that are open of each limited key."""
    max_seats: int
    """How many may be, of one key."""
    sessions: Sessions
    subject: Subject
    """What pictures are taken of."""
    look_around: Callable[[], Awaitable[list[TaskNode]]]
    """Asks all front ends how they are."""
    patience: float
    """Seconds after which a front end counts as hung that gives no sign of life."""


@attrs.frozen(kw_only=True)
class Counted:
    """What one front end has counted, and how much is going on in it."""

    snapshot: Snapshot = attrs.field(factory=Snapshot)
    num_tokenizing: int = 0
    num_streams: int = 0
    stream_bytes: int = 0


@attrs.frozen
class Looked:
    """How a front end is: what goes into a picture."""

    counted: Counted
    tasks: TaskNode


@attrs.define(eq=False, kw_only=True)
class HostedRequest(Request):
    """A request of a front end. What is decided about it is noted at home."""

    home: Home
    number: int
    num_left: int
    """Sequences whose ends the front end hasn't been told."""
    owes_prompt: bool
    """Whether the prompt's log-probabilities are wanted and haven't been told."""

    def admit(self) -> None:
        """The request is in the queue, or was rejected. Idempotent."""
        if not self.admitted.is_set():
            super().admit()
            self.home.note_decision(self)


@attrs.define(eq=False, kw_only=True)
class HostedSequence(Sequence):
    """A sequence of a front end. Where it comes to is noted at home."""

    home: Home
    number: int
    is_plain: bool
    """Whether the next token is all that a step gives, unless it is the last one."""

    def move_to(self, state: State) -> None:
        """Change the state."""
        # Its admission is told by the request.
        is_news = self.state is not State.CREATED and state is not State.FINISHED
        super().move_to(state)
        if is_news:
            self.home.note_move(self, state)


class Home:
    """One front end.

    Args:
        socket: connected to it.
        hosting: what it shares with others.
        handlers: what it may ask, beside what is answered here.
    """

    def __init__(self, socket: PairSocket, hosting: Hosting, handlers: Handlers) -> None:
        self._socket = socket
        self._hosting = hosting
        self._pulse = Pulse(hosting.patience)
        self._work = trio.Event()
        """There may be something to send."""
        self._letters: list[FromEngine] = []
        """Go out before the next update."""
        self._sequences: dict[int, HostedSequence] = {}
        """Those that the front end waits for."""
        self._seats: dict[int, str] = {}
        self._told_line = (0, 0)
        self._admitted: list[tuple[int, float]] = []
        self._rejected: list[tuple[int, Fault]] = []
        self._moves: list[tuple[int, int]] = []
        self._scheduled: list[HostedSequence] = []
        self._prompts: list[Prompt] = []
        self._steps: list[Step] = []
        """Those that haven't been sent."""
        self._num_untaken = 0
        """Updates with steps that were sent and not taken."""
        self.numbers: list[int] = []
        """Of the step that is being taken apart, those who got just the next token."""
        self.tokens: list[int] = []
        """Beside them."""
        self._rows: list[Row] = []
        self.requests: dict[HostedRequest, None] = {}
        """Those of whom it waits for something."""
        self.num_lost = 0
        """Those that were open when it went."""
        self.num_ended = 0
        """Requests that aren't open any more."""
        self._turns = HostedTurns(hosting.sessions, self.tell)
        self._watches = HostedWatches(hosting.subject, hosting.look_around)
        handlers = {
            **handlers,
            **self._turns.handlers,
            **self._watches.handlers,
            "take_seat": self._take_seat,
        }
        self.counted = Counted()
        """What the front end answered when it was asked last what it has counted."""
        self.tasks: TaskNode | None = None
        """And what its tasks were, when it was asked that; None until then."""
        self.asks = Asks(self.tell, handlers, FrontEndLost("the front end is gone"))
        """What the front end is asked, and asks."""

    # ---- what the scheduler does

    def note_decision(self, request: HostedRequest) -> None:
        """``request`` was admitted or rejected."""
        if request.num_left == 0:
            return
        if request.rejection is None:
            queued = request.times.queued
            assert queued is not None
            self._admitted.append((request.number, self._hosting.clock.shared(queued)))
        else:
            self._reject(request, request.rejection)
        self.wake()
        self._hosting.on_line()

    def _reject(self, request: HostedRequest, error: Exception) -> None:
        self._rejected.append((request.number, fault_of(error)))
        for sequence in request.sequences:
            assert isinstance(sequence, HostedSequence)
            self._let_go(sequence)

    def note_move(self, sequence: HostedSequence, state: State) -> None:
        """``sequence`` is in that state now."""
        if sequence.number in self._sequences:
            self._moves.append((sequence.number, _PLACES[state]))
            if state is State.PREFILL and sequence.request.times.first_scheduled is None:
                # The time is there when this goes out.
                self._scheduled.append(sequence)
            self.wake()
        self._hosting.on_line()

    def take(self, sequence: HostedSequence, output: SequenceOutput) -> None:
        """A step gave ``output``, which isn't just the next token."""
        if sequence.number not in self._sequences:
            return
        request, finish = sequence.request, output.finish
        assert isinstance(request, HostedRequest)
        if request.owes_prompt and (output.token_ids or (finish and finish.error is None)):
            self._tell_prompt(request, sequence.number)
        ending: Ending | None = None
        if finish is not None:
            ending = self._ending_of(sequence, finish)
            self._let_go(sequence)
        logprobs = None if output.logprobs is None else plain_entries(output.logprobs)
        self._rows.append(Row(sequence.number, output.token_ids, logprobs, ending))

    def _ending_of(self, sequence: HostedSequence, finish: Finish) -> Ending:
        shared = self._hosting.clock.shared
        first, last = sequence.request.times.first_token, sequence.last_token
        return Ending.of(
            finish,
            None if finish.error is None else fault_of(finish.error),
            None if first is None else shared(first),
            None if last is None else shared(last),
            sequence.request.vector,
        )

    def _tell_prompt(self, request: HostedRequest, number: int) -> None:
        """Tell the log-probabilities of the prompt, which are complete."""
        request.owes_prompt = False
        for sequence in request.sequences:
            assert isinstance(sequence, HostedSequence)
            sequence.is_plain = request.params.logprobs is None
        logprobs = request.prompt_logprobs
        assert logprobs is not None
        pieces = logprobs.pieces()
        self._prompts.append(
            Prompt(number, logprobs.start, logprobs.num_top, logprobs.token_ids, pieces)
        )

    def take_count(self, answer: object) -> None:
        """The front end says what it has counted."""
        self.counted = msgspec.convert(answer, Counted)

    def take_look(self, answer: object) -> None:
        """The front end says what it has counted, and what its tasks are."""
        looked = msgspec.convert(answer, Looked)
        self.counted, self.tasks = looked.counted, looked.tasks

    def end_step(self, time: float) -> None:
        """All that a step gave has been taken apart; ``time`` is as messages have it."""
        if not self.numbers and not self._rows:
            return
        self._steps.append(Step(time, packed(self.numbers), packed(self.tokens), self._rows))
        self.numbers, self.tokens, self._rows = [], [], []
        self.wake()

    def _let_go(self, sequence: HostedSequence) -> None:
        """The front end waits no more for ``sequence``, or has been told of its end."""
        if self._sequences.pop(sequence.number, None) is None:
            return
        request = sequence.request
        assert isinstance(request, HostedRequest)
        request.num_left -= 1
        if request.num_left == 0:
            self.requests.pop(request)
            self.num_ended += 1
            self._hosting.forget(request)

    # ---- what the front end says

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
                nursery.start_soon(self._pulse.watch)
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
        """There may be something to tell."""
        self._work.set()

    async def _send(self) -> None:
        while True:
            letters, self._letters = self._letters, []
            update = self._update()
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

    def _update(self) -> Update | None:
        """All that is new; None if nothing is."""
        scheduler = self._hosting.scheduler
        line = (scheduler.num_waiting, scheduler.num_waiting_tokens)
        step: Step | None = None
        if self._steps and self._num_untaken < MAX_UNTAKEN:
            step, self._steps = merged(self._steps), []
            self._num_untaken += 1
        has_news = self._admitted or self._rejected or self._moves or step is not None
        if not has_news and line == self._told_line:
            return None
        self._told_line = line
        update = Update(
            line=line,
            admitted=self._admitted,
            rejected=self._rejected,
            moves=self._moves,
            scheduled=[self._times_of(each) for each in self._scheduled],
            prompts=self._prompts,
            step=step,
        )
        self._admitted, self._rejected, self._moves, self._scheduled = [], [], [], []
        self._prompts = []
        return update

    def _times_of(self, sequence: HostedSequence) -> tuple[int, float, int]:
        request = sequence.request
        scheduled = request.times.first_scheduled
        assert scheduled is not None
        shared = self._hosting.clock.shared(scheduled)
        return sequence.number, shared, request.num_cached_tokens

    async def _receive(self, nursery: trio.Nursery) -> int:
        while True:
            message = await receive_from_front_end(self._socket)
            match message:
                case Submit():
                    self._submit(message)
                case Abort():
                    self._abort(message.numbers)
                case Taken():
                    self._num_untaken -= message.count
                    self.wake()
                case Ask():
                    self.asks.on_ask(message, nursery)
                case Answer():
                    self.asks.on_answer(message)
                case Withdraw():
                    self.asks.on_withdraw(message)
                case Alive():
                    self._pulse.beat()
                case LeaveSeat():
                    self._leave_seat(message.number)
                case LeaveTurn():
                    self._turns.leave(message.number)
                case LeaveWatch():
                    self._watches.leave(message.number)
                case Drained():
                    return message.num_cut
                case _:
                    raise FrontEndLost(f"the front end sent {type(message).__name__}")

    def _submit(self, message: Submit) -> None:
        params = message.params
        request = HostedRequest(
            id=message.id,
            prompt=_NO_PROMPT,
            params=params,
            stream=Stream(StreamBudget(0, 0)),
            times=Times(arrived=self._hosting.clock.own(message.arrived)),
            priority=message.priority,
            cache_salt=message.cache_salt,
            retention=message.retention,
            adapter=message.adapter,
            prompt_ids=numbers_of(message.prompt_ids),
            home=self,
            number=message.number,
            num_left=params.n,
            owes_prompt=params.prompt_logprobs is not None,
        )
        request.fewest_tokens = len(request.prompt_ids)
        sampler = attrs.evolve(
            message.sampler, grammar=params.grammar, extra_args=params.extra_args
        )
        sequences = [
            HostedSequence(
                request=request,
                index=index,
                sampler=attrs.evolve(sampler, sequence_index=index),
                home=self,
                number=message.number + index,
                is_plain=params.logprobs is None and params.prompt_logprobs is None,
            )
            for index in range(params.n)
        ]
        request.sequences += sequences
        try:
            self._hosting.enter(request)
        except (Paused, QueueFull) as error:
            self._rejected.append((request.number, fault_of(error)))
            self.wake()
            return
        self.requests[request] = None
        self._sequences |= {each.number: each for each in sequences}
        self._hosting.submit(request)

    def _abort(self, numbers: list[int]) -> None:
        for number in numbers:
            sequence = self._sequences.get(number)
            if sequence is not None:
                self._let_go(sequence)
                self._hosting.scheduler.abort(sequence, Finish(FinishReason.ABORT))
        self._hosting.on_line()

    async def _take_seat(self, arguments: list[Any]) -> bool:
        """Whether one more request of a key may be open; if so it has the seat of that number."""
        number, key = arguments
        seats = self._hosting.seats
        if seats[key] >= self._hosting.max_seats:
            return False
        seats[key] += 1
        self._seats[number] = key
        return True

    def _leave_seat(self, number: int) -> None:
        key = self._seats.pop(number, None)
        if key is not None:
            self._hosting.seats[key] -= 1

    def _close(self) -> None:
        """The front end is gone: nothing more is computed for it."""
        self.asks.close()
        self.num_lost = len(self.requests)
        # The last one first: nobody is to compute the prompt in place of one that has left.
        self._abort(sorted(self._sequences, reverse=True))
        for number in list(self._seats):
            self._leave_seat(number)
        self._turns.leave_all()
        self._watches.leave_all()


async def receive_from_front_end(socket: PairSocket) -> FromFrontEnd:
    """The next message.

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
