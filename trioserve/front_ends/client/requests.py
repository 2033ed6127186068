"""The requests that a front end has sent to the engine process, and its updates of them.

Updates set states, times and log-probabilities of prompts on the request, as the scheduler does.
Outputs for a sequence that has ended here are dropped.
"""

from __future__ import annotations

from trioserve.front_ends.clock import SharedClock
from trioserve.front_ends.messages import (
    STATES,
    Prompt,
    SchedulerUpdate,
    StepRow,
    StepUpdate,
    entries_of,
    numbers_of,
)
from trioserve.front_ends.wire_errors import error_of
from trioserve.protocol.errors import RequestAborted
from trioserve.protocol.wire import Ready
from trioserve.requests.logprobs import PromptLogprobs
from trioserve.requests.request import Finish, Request, Sequence, SequenceOutput, State
from trioserve.requests.tensors import RequestTensors


class SentRequests:
    """The sent requests of one front end.

    Args:
        clock: translates the times of messages.
        ready: has the shapes of output tensors.
    """

    def __init__(self, clock: SharedClock, ready: Ready) -> None:
        self._clock = clock
        self._ready = ready
        self.next_number = 0
        """The number of the next request's first sequence; the others follow it."""
        self._requests: dict[int, Request] = {}
        """Requests that have been neither admitted nor rejected, by number."""
        self._sequences: dict[int, Sequence] = {}
        """Sequences that haven't ended, by number."""
        self._with_tensors: dict[int, Request] = {}
        """Requests with output tensors and sequences that haven't ended, by number."""
        self._numbers: dict[Sequence, int] = {}
        """The numbers of those sequences."""

    @property
    def idle(self) -> bool:
        """True if none of their sequences is to be computed."""
        return not self._sequences

    @property
    def num_requests(self) -> int:
        """The number of requests with such sequences."""
        return len({id(each.request) for each in self._numbers})

    # ---- what happens here

    def add(self, request: Request) -> list[int]:
        """Add ``request``, which is sent under the next number.

        Returns:
            the numbers of its sequences that have ended meanwhile.
        """
        number = self.next_number
        self.next_number += len(request.sequences)
        self._requests[number] = request
        request.tensors = RequestTensors.of(
            request.params,
            len(request.prompt_ids),
            hidden_size=self._ready.hidden_size,
            vocab_size=self._ready.vocab_size,
        )
        if request.tensors is not None:
            self._with_tensors[number] = request
        ended = []
        for sequence in request.sequences:
            if sequence.state is not State.FINISHED:
                self._sequences[number + sequence.index] = sequence
                self._numbers[sequence] = number + sequence.index
            else:
                ended.append(number + sequence.index)
        return ended

    def abort(self, sequence: Sequence, finish: Finish) -> int | None:
        """End ``sequence``, which hasn't ended. A request that isn't admitted yet is rejected.

        Returns:
            its number, if the engine process knows it.
        """
        number = self._let_go(sequence)
        is_admitted = sequence.state not in (State.CREATED, State.TOKENIZING)
        _finish(sequence, finish)
        request = sequence.request
        if not is_admitted and request.ended:
            if number is not None:
                self._requests.pop(number - sequence.index, None)
            request.reject(finish.error or RequestAborted("the request was aborted"))
        return number

    def _let_go(self, sequence: Sequence) -> int | None:
        """Forget ``sequence``; return its number, if the engine process knew it."""
        number = self._numbers.pop(sequence, None)
        if number is not None:
            del self._sequences[number]
            first = number - sequence.index
            others = range(first, first + len(sequence.request.sequences))
            if first in self._with_tensors and not any(each in self._sequences for each in others):
                del self._with_tensors[first]
        return number

    # ---- what is told of them

    def take(self, update: SchedulerUpdate) -> list[SequenceOutput] | None:
        """Take the part of ``update`` that is about requests.

        Returns:
            a step's outputs for sequences that haven't ended here; None if there was no step.
        """
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
        for rows in update.tensors:
            if rows.number in self._with_tensors:
                self._with_tensors[rows.number].take_rows(rows.index, rows.piece)
        return None if update.step is None else self._outputs_of(update.step)

    def _admit(self, number: int, queued: float) -> None:
        request = self._requests.pop(number, None)
        if request is None:
            return
        # The clock of another host's engine process isn't exact.
        request.times.queued = max(queued, request.times.arrived)
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

    def _outputs_of(self, step: StepUpdate) -> list[SequenceOutput]:
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

    def _output_of(self, sequence: Sequence, row: StepRow, now: float) -> SequenceOutput:
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
            sequence.num_draft_tokens = ending.num_draft_tokens
            sequence.num_accepted_drafts = ending.num_accepted_drafts
            self._let_go(sequence)
            _finish(sequence, finish)
        return SequenceOutput(sequence, row.tokens, logprobs, finish)

    def check_integrity(self) -> None:
        """Assert that exactly the sequences are known here that the engine process computes."""
        assert self._sequences == {number: each for each, number in self._numbers.items()}
        sent = {number - sequence.index for number, sequence in self._sequences.items()}
        assert self._requests.keys() <= sent
        for number, sequence in self._sequences.items():
            assert sequence.state is not State.FINISHED
            is_admitted = sequence.request.admitted.is_set()
            assert is_admitted != (number - sequence.index in self._requests)


def _note_first(sequence: Sequence, now: float) -> None:
    """Note the time of the first token of ``sequence``."""
    times = sequence.request.times
    if times.first_token is None:
        times.first_token = now


def _finish(sequence: Sequence, finish: Finish) -> None:
    times = sequence.request.times
    if sequence.last_token is not None:
        times.last_token = max(times.last_token or sequence.last_token, sequence.last_token)
    sequence.finish = finish
    sequence.move_to(State.FINISHED)
