"""Result processing: append tokens to sequences, and end sequences.

In a step of decoding, most rows give just the next token, or the next few. The columns of
:mod:`~.token_counts` tell such rows from others for all rows at once. Their tokens are appended,
without a look at anything else of the sequence. All other rows, such as the first and the last of
an answer, are taken one by one. A token of such a row may end the sequence in the middle of the
row: the tokens after it are dropped and counted nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import attrs
import numpy as np

from trioserve.observability.scheduler_statistics import Observer
from trioserve.protocol.errors import EngineError
from trioserve.protocol.sampling import NAN_LOGITS
from trioserve.requests.request import Finish, Sequence, SequenceOutput, State
from trioserve.scheduler.beams import Beams
from trioserve.scheduler.plan_builder import InFlight
from trioserve.scheduler.result_validation import Results
from trioserve.scheduler.sequence_state import SequenceState
from trioserve.scheduler.state import SchedulerState, end_of
from trioserve.scheduler.stop_conditions import ending, ending_without_token
from trioserve.scheduler.token_counts import Bools, Ints


@attrs.define(eq=False)
class ResultProcessor:
    """The part of the scheduler that takes results."""

    _state: SchedulerState
    _beams: Beams
    _observer: Observer | None

    def take(self, plan: InFlight, results: Results, now: float) -> list[SequenceOutput]:
        """Count what the rows of ``plan`` computed, and give the sequences their tokens."""
        tokens, gained = self._sort(plan, results)
        plain = gained > 0
        self._count_tokens(plan.slots[plain], gained[plain], now)
        outputs: list[SequenceOutput] = []
        rows = zip(plan.seq_states, tokens.tolist(), gained.tolist(), strict=True)
        for index, (seq_state, token, count) in enumerate(rows):
            sequence = seq_state.sequence
            if count == 1:
                sequence.output_ids.append(token)
                outputs.append(SequenceOutput(sequence, (token,)))
            elif count:
                several = results.row(index)
                sequence.output_ids += several
                outputs.append(SequenceOutput(sequence, tuple(several)))
            elif plan.samples[index] and sequence.state is not State.FINISHED:
                is_held = seq_state.holds_slot and seq_state.generation == plan.generations[index]
                if is_held or sequence.request.beams is None:  # a beam is computed again
                    outputs += self._take_row(seq_state, results, index, now)
        return outputs

    def _sort(self, plan: InFlight, results: Results) -> tuple[Ints, Ints]:
        """Count what was computed, and find the plain rows, which gave just the next tokens.

        A plain row isn't the first in its slot and can't be the last, and only tokens were wanted.

        Returns:
            The first token of each row, -1 if there is none, and the number of tokens of each plain
            row, 0 for other rows.
        """
        counts, slots, offsets = self._state.memory.counts, plan.slots, results.offsets
        # A slot isn't given to another sequence while a plan in flight names it.
        held = counts.generation[slots] == plan.generations
        counts.computed[slots[held]] += plan.counts[held]
        counts.note_drawn(slots[held & plan.samples])
        given = offsets[1:] - offsets[:-1]
        drew = plan.samples & (given > 0)
        tokens = np.full(len(slots), -1, dtype=np.int64)
        tokens[drew] = results.tokens[offsets[:-1][drew]]
        auto_continues = counts.computed[slots] + given < counts.limit[slots]
        plain = held & (tokens >= 0) & auto_continues & ~plan.wants_more & ~counts.may_stop(tokens)
        plain &= ~np.isnan(counts.last_token[slots])
        if plan.limits is not None:
            plain &= ~self._may_end_later(results)
            counts.unsettled[slots[held & (plan.limits > 1)]] = False
            counts.settle(slots[plain], given[plain] - 1)
        return tokens, np.where(plain, given, 0)

    def _may_end_later(self, results: Results) -> Bools:
        """Return a mask of the rows in which a token may end the sequence."""
        ends = (results.tokens < 0) | self._state.memory.counts.may_stop(results.tokens)
        num_before = np.concatenate([[0], np.cumsum(ends)])[results.offsets]
        may_end: Bools = num_before[1:] > num_before[:-1]
        return may_end

    def _count_tokens(self, slots: Ints, gained: Ints, now: float) -> None:
        """Count ``gained`` tokens more for each of ``slots``."""
        last_token = self._state.memory.counts.last_token
        num_tokens = int(gained.sum())
        self._state.counters.num_tokens_sampled += num_tokens
        if self._observer is not None and num_tokens:
            gaps = now - last_token[slots]
            if num_tokens > len(slots):
                gaps = np.repeat(gaps / gained, gained)
            self._observer.observe_gaps(gaps)
        last_token[slots] = now

    def _take_row(
        self, seq_state: SequenceState, results: Results, index: int, now: float
    ) -> list[SequenceOutput]:
        """Give a sequence that hasn't finished the tokens of its row, as far as it takes them."""
        sequence, tokens = seq_state.sequence, results.row(index)
        outputs: list[SequenceOutput] = []
        if sequence.request.beams is not None and sequence.max_tokens and tokens[0] != NAN_LOGITS:
            found = results.continuations(index, sequence.request.params)
            return self._beams.take(seq_state, tokens[0], found, now)
        if tokens[0] >= 0 and sequence.max_tokens:
            output = self._accept(seq_state, results, index, now)
            outputs.append(output)
            if output.finish is not None or tokens[-1] >= 0:
                return outputs
        sequence.request.vector = results.vectors.get(seq_state.slot, b"")
        finish = ending_without_token(sequence, tokens[-1])
        self._state.counters.num_corrupted += isinstance(finish.error, EngineError)
        if not sequence.output_ids or sequence.request.beams is not None:
            return outputs + self._state.finish_all(sequence.request, finish)
        # The detokenizer may have found the end before this token. If not, it aborts the others.
        self._state.finish(sequence, finish)
        return [*outputs, end_of(sequence, finish)]

    def _accept(
        self, seq_state: SequenceState, results: Results, index: int, now: float
    ) -> SequenceOutput:
        """Append the tokens of row ``index`` to the output, up to one that ends it.

        A stop id is part of the output's tokens; the detokenizer leaves it out of the text.
        """
        sequence = seq_state.sequence
        request = sequence.request
        accepted, finish = _append(sequence, results.row(index))
        count = len(accepted)
        seq_state.settle(count - 1)
        self._state.counters.num_tokens_sampled += count
        if self._observer is not None:
            seq_state.bring_times_up_to_date()
            self._observer.observe_tokens(sequence, count, now)
        if request.times.first_token is None:
            request.times.first_token = now
        seq_state.note_token(now)
        if finish is not None:
            self._state.finish(sequence, finish)
        logprobs = None
        if request.params.logprobs is not None:
            first = int(results.offsets[index])
            places = range(first, first + count)
            logprobs = tuple([results.logprob(place, request.params) for place in places])
        return SequenceOutput(sequence, accepted, logprobs, finish)


def _append(sequence: Sequence, tokens: Seq[int]) -> tuple[tuple[int, ...], Finish | None]:
    """Append ``tokens`` up to the end of ``sequence``; return those appended, and the end if any.

    The first token must not be negative.
    """
    for count, token in enumerate(tokens):
        if token < 0:
            return tuple(tokens[:count]), None
        sequence.output_ids.append(token)
        finish = ending(sequence)
        if finish is not None:
            return tuple(tokens[: count + 1]), finish
    return tuple(tokens), None
