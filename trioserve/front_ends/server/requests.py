"""The requests of a front end in the engine process, and the updates for it.

A request notes the scheduler's decisions and its changes of state here
(:class:`HostedRequest`, :class:`HostedSequence`); they go out in one message. While a front end
lags, or is stopped, its steps are collected here and go out as one. That delays no other front end,
and is bounded, because admitted requests are bounded and end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import attrs

from trioserve.front_ends.coalesce import merged
from trioserve.front_ends.messages import (
    STATES,
    GivenRows,
    Prompt,
    SchedulerUpdate,
    SequenceEnd,
    StepRow,
    StepUpdate,
    Submit,
    packed,
    plain_entries,
)
from trioserve.front_ends.server.context import ServerContext
from trioserve.front_ends.wire_errors import ErrorMessage, fault_of
from trioserve.protocol.errors import FrontEndLost, Paused, QueueFull
from trioserve.protocol.wire import MAX_MESSAGE_BYTES, TensorPiece, ints
from trioserve.requests.prompts import TokensPrompt
from trioserve.requests.request import (
    Finish,
    FinishReason,
    Request,
    Sequence,
    SequenceOutput,
    State,
    Times,
)
from trioserve.requests.stream import Stream, StreamBudget

MAX_UNTAKEN = 3
"""Updates on their way to a front end: one in work, the next one, and one that is taken but not
acknowledged (:data:`~trioserve.front_ends.client.scheduler.TAKEN_TOGETHER`)."""

MAX_ROW_BYTES = MAX_MESSAGE_BYTES // 4
"""Bytes of output tensors after which no further rows are put into an update. The rows of one piece
may have twice as many."""

_NO_PROMPT = TokensPrompt(())
"""The prompt of every request here, because only its ids come."""
_PLACES = {state: place for place, state in enumerate(STATES)}


@attrs.define(eq=False, kw_only=True)
class HostedRequest(Request):
    """A request of a front end. It notes the scheduler's decision on its admission."""

    owner: FrontEndRequests
    number: int
    num_left: int
    """Sequences for which the front end hasn't been sent an end."""
    owes_prompt: bool
    """True if the prompt's log-probabilities are wanted and haven't been sent."""

    def take_rows(self, index: int, piece: TensorPiece) -> None:
        """Take rows of the output tensors, and hand them to the front end."""
        super().take_rows(index, piece)
        assert self.tensors is not None
        self.tensors.forget_rows()
        self.owner.note_rows(self, index, piece)

    def admit(self) -> None:
        """Note that the request is in the queue, or was rejected. Idempotent."""
        if not self.admitted.is_set():
            super().admit()
            self.owner.note_decision(self)


@attrs.define(eq=False, kw_only=True)
class HostedSequence(Sequence):
    """A sequence of a front end. It notes its changes of state."""

    owner: FrontEndRequests
    number: int
    is_plain: bool
    """True if a step gives it just the next token, except for the last one."""

    def move_to(self, state: State) -> None:
        """Change the state."""
        # Its admission is told by the request.
        is_news = self.state is not State.CREATED and state is not State.FINISHED
        super().move_to(state)
        if is_news:
            self.owner.note_move(self, state)


class FrontEndRequests:
    """The requests of one front end.

    Args:
        context: the parts of the engine process that front ends share.
        wake: called when there may be something to tell.
    """

    def __init__(self, context: ServerContext, wake: Callable[[], None]) -> None:
        self._context = context
        self._wake = wake
        self.requests: dict[HostedRequest, None] = {}
        """Requests for which the front end waits."""
        self._sequences: dict[int, HostedSequence] = {}
        """Sequences for which it waits, by number."""
        self._next_number = 0
        """Least number that no sequence has had."""
        self.num_ended = 0
        """Requests that aren't open any more."""
        self._reported_queue = (0, 0)
        self._admitted: list[tuple[int, float]] = []
        self._rejected: list[tuple[int, ErrorMessage]] = []
        self._moves: list[tuple[int, int]] = []
        self._scheduled: list[HostedSequence] = []
        self._prompts: list[Prompt] = []
        self._tensors: deque[GivenRows] = deque()
        """Rows that haven't been sent."""
        self._steps: list[StepUpdate] = []
        """Steps that haven't been sent."""
        self.num_untaken = 0
        """Updates with steps that were sent and not taken."""
        self.numbers: list[int] = []
        """Sequences of the present step that got just the next token."""
        self.tokens: list[int] = []
        """The tokens of those sequences."""
        self._rows: list[StepRow] = []

    # ---- what the scheduler does

    def note_decision(self, request: HostedRequest) -> None:
        """Note that ``request`` was admitted or rejected."""
        if request.num_left == 0:
            return
        if request.rejection is None:
            queued = request.times.queued
            assert queued is not None
            self._admitted.append((request.number, self._context.clock.shared(queued)))
        else:
            self._reject(request, request.rejection)
        self._wake()
        self._context.on_queue_change()

    def _reject(self, request: HostedRequest, error: Exception) -> None:
        self._rejected.append((request.number, fault_of(error)))
        for sequence in request.sequences:
            assert isinstance(sequence, HostedSequence)
            self._let_go(sequence)

    def note_move(self, sequence: HostedSequence, state: State) -> None:
        """Note the new state of ``sequence``."""
        if sequence.number in self._sequences:
            self._moves.append((sequence.number, _PLACES[state]))
            if state is State.PREFILL and sequence.request.times.first_scheduled is None:
                # The time is there when this goes out.
                self._scheduled.append(sequence)
            self._wake()
        self._context.on_queue_change()

    def take(self, sequence: HostedSequence, output: SequenceOutput) -> None:
        """Note a step's output that isn't just the next token."""
        if sequence.number not in self._sequences:
            return
        request, finish = sequence.request, output.finish
        assert isinstance(request, HostedRequest)
        if request.owes_prompt and (output.token_ids or (finish and finish.error is None)):
            self._tell_prompt(request, sequence.number)
        ending: SequenceEnd | None = None
        if finish is not None:
            ending = self._ending_of(sequence, finish)
            self._let_go(sequence)
        logprobs = None if output.logprobs is None else plain_entries(output.logprobs)
        self._rows.append(StepRow(sequence.number, output.token_ids, logprobs, ending))

    def _ending_of(self, sequence: HostedSequence, finish: Finish) -> SequenceEnd:
        shared = self._context.clock.shared
        first, last = sequence.request.times.first_token, sequence.last_token
        return SequenceEnd.of(
            finish,
            None if finish.error is None else fault_of(finish.error),
            None if first is None else shared(first),
            None if last is None else shared(last),
            sequence,
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

    def note_rows(self, request: HostedRequest, index: int, piece: TensorPiece) -> None:
        """Note rows of output tensors that came in the present step."""
        if request in self.requests:
            self._tensors.append(GivenRows(request.number, index, piece))

    def end_step(self, time: float) -> None:
        """Finish the present step; ``time`` is as messages have it."""
        if not self.numbers and not self._rows:
            return
        self._steps.append(StepUpdate(time, packed(self.numbers), packed(self.tokens), self._rows))
        self.numbers, self.tokens, self._rows = [], [], []
        self._wake()

    def _let_go(self, sequence: HostedSequence) -> None:
        """Forget ``sequence``: the front end waits no more for it, or has been sent its end."""
        if self._sequences.pop(sequence.number, None) is None:
            return
        request = sequence.request
        assert isinstance(request, HostedRequest)
        request.num_left -= 1
        if request.num_left == 0:
            self.requests.pop(request)
            self.num_ended += 1
            self._context.forget(request)

    def update(self) -> SchedulerUpdate | None:
        """Return all news; None if there are none."""
        schedulers = self._context.schedulers
        queue = (schedulers.num_waiting, schedulers.num_waiting_tokens)
        step: StepUpdate | None = None
        tensors: list[GivenRows] = []
        if self._steps and self.num_untaken < MAX_UNTAKEN:
            tensors = self._take_tensors()
            if not self._tensors:  # No token comes before its rows.
                step, self._steps = merged(self._steps), []
                self.num_untaken += 1
        has_news = self._admitted or self._rejected or self._moves or tensors or step is not None
        if not has_news and queue == self._reported_queue:
            return None
        self._reported_queue = queue
        update = SchedulerUpdate(
            queue=queue,
            admitted=self._admitted,
            rejected=self._rejected,
            moves=self._moves,
            scheduled=[self._times_of(each) for each in self._scheduled],
            prompts=self._prompts,
            tensors=tensors,
            step=step,
        )
        self._admitted, self._rejected, self._moves, self._scheduled = [], [], [], []
        self._prompts = []
        return update

    def _take_tensors(self) -> list[GivenRows]:
        """Return the oldest rows that haven't been sent, as many as a message has room for."""
        taken: list[GivenRows] = []
        num_bytes = 0
        while self._tensors and num_bytes < MAX_ROW_BYTES:
            taken.append(self._tensors.popleft())
            num_bytes += len(taken[-1].piece.rows)
        return taken

    def _times_of(self, sequence: HostedSequence) -> tuple[int, float, int]:
        request = sequence.request
        scheduled = request.times.first_scheduled
        assert scheduled is not None
        shared = self._context.clock.shared(scheduled)
        return sequence.number, shared, request.num_cached_tokens

    # ---- what the front end says

    def taken(self, count: int) -> None:
        """Note that the front end has taken so many updates with steps."""
        self.num_untaken -= count
        self._wake()

    def submit(self, message: Submit) -> None:
        """Take in a request of the front end.

        Raises:
            FrontEndLost: its number isn't new.
        """
        params = message.params
        if message.number < self._next_number:
            raise FrontEndLost(f"the front end sent a request with the old number {message.number}")
        self._next_number = message.number + params.n
        request = HostedRequest(
            id=message.id,
            prompt=_NO_PROMPT,
            params=params,
            stream=Stream(StreamBudget(0, 0)),
            times=Times(arrived=self._context.clock.own(message.arrived)),
            priority=message.priority,
            cache_salt=message.cache_salt,
            tenant=message.tenant,
            retention=message.retention,
            adapter=message.adapter,
            default_max_tokens=message.default_max_tokens,
            prompt_ids=ints(message.prompt_column).tolist(),
            prompt_column=message.prompt_column,
            embedded=message.embedded,
            owner=self,
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
                owner=self,
                number=message.number + index,
                is_plain=params.logprobs is None and params.prompt_logprobs is None,
            )
            for index in range(params.n)
        ]
        request.sequences += sequences
        try:
            self._context.enter(request)
        except (Paused, QueueFull) as error:
            self._rejected.append((request.number, fault_of(error)))
            self._wake()
            return
        self.requests[request] = None
        self._sequences |= {each.number: each for each in sequences}
        self._context.submit(request)

    def abort(self, numbers: list[int]) -> None:
        """Abort sequences for which the front end waits no more."""
        for number in numbers:
            sequence = self._sequences.get(number)
            if sequence is not None:
                self._let_go(sequence)
                self._context.schedulers.abort(sequence, Finish(FinishReason.ABORT))
        self._context.on_queue_change()

    def abort_all(self) -> None:
        """Abort all sequences, because the front end is gone."""
        # The last sequence first, so that no other one takes over the prompt.
        self.abort(sorted(self._sequences, reverse=True))
