"""What a result means for the sequences: tokens that are appended, and ends.

In a step of decoding, most rows give just the next token. That a row is one of those, the columns
of :mod:`~.counts` tell for all rows at once; its token is appended, and nothing else of the
sequence is looked at. All other rows, such as the first of an answer and the last, are taken one by
one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np

from trioserve.observability.scheduler_statistics import Observer
from trioserve.protocol.errors import EngineError
from trioserve.requests.request import SequenceOutput, State
from trioserve.scheduler.plan_builder import InFlight
from trioserve.scheduler.result_validation import Results
from trioserve.scheduler.sequence_state import SequenceState
from trioserve.scheduler.stop_conditions import ending, ending_without_token
from trioserve.scheduler.token_counts import Bools, Ints

if TYPE_CHECKING:
    from trioserve.scheduler.core import SchedulerCore


@attrs.define(eq=False)
class ResultProcessor:
    """The part of a :class:`~.core.SchedulerCore` that takes results in."""

    _core: SchedulerCore
    _observer: Observer | None

    def take(self, plan: InFlight, results: Results, now: float) -> list[SequenceOutput]:
        """Count what the rows of ``plan`` computed, and give the sequences their tokens."""
        tokens, plain = self._sort(plan, results)
        self._count_tokens(plan.slots[plain], now)
        outputs: list[SequenceOutput] = []
        rows = zip(plan.computations, tokens.tolist(), plain.tolist(), strict=True)
        for index, (computation, token, is_plain) in enumerate(rows):
            sequence = computation.sequence
            if is_plain:
                sequence.output_ids.append(token)
                outputs.append(SequenceOutput(sequence, (token,)))
            elif plan.samples[index] and sequence.state is not State.FINISHED:
                if token < 0 or sequence.max_tokens == 0:
                    sequence.request.vector = results.vectors.get(computation.slot, b"")
                    finish = ending_without_token(sequence, token)
                    self._core.counters.num_corrupted += isinstance(finish.error, EngineError)
                    outputs += self._core.finish_all(sequence.request, finish)
                else:
                    at = int(results.offsets[index])
                    outputs.append(self._accept(computation, results, at, now))
        return outputs

    def _sort(self, plan: InFlight, results: Results) -> tuple[Ints, Bools]:
        """Count what was computed, and tell the rows that gave just the next token.

        Returns:
            the token of each row, -1 where there is none, and whether the row is plain: it isn't
            the first or perhaps the last in its slot, and nothing but a token was wanted.
        """
        counts, slots, offsets = self._core.memory.counts, plan.slots, results.offsets
        # A slot isn't given to anybody else while a plan in flight names it.
        held = counts.generation[slots] == plan.generations
        counts.computed[slots[held]] += plan.counts[held]
        drew = plan.samples & (offsets[1:] > offsets[:-1])
        tokens = np.full(len(slots), -1, dtype=np.int64)
        tokens[drew] = results.tokens[offsets[:-1][drew]]
        auto_continues = counts.computed[slots] + 1 < counts.limit[slots]
        plain = held & (tokens >= 0) & auto_continues & ~plan.wants_more & ~counts.may_stop(tokens)
        plain &= ~np.isnan(counts.last_token[slots])
        return tokens, plain

    def _count_tokens(self, slots: Ints, now: float) -> None:
        """Each of ``slots`` has got one more token."""
        last_token = self._core.memory.counts.last_token
        self._core.counters.num_tokens_sampled += len(slots)
        if self._observer is not None and len(slots):
            self._observer.observe_gaps(now - last_token[slots])
        last_token[slots] = now

    def _accept(
        self, computation: SequenceState, results: Results, index: int, now: float
    ) -> SequenceOutput:
        """Append token ``index`` of ``results`` to the output, and see whether it is the last.

        A stop id is part of the output's tokens; the detokenizer leaves it out of the text.
        """
        token = int(results.tokens[index])
        sequence = computation.sequence
        request = sequence.request
        params = request.params
        sequence.output_ids.append(token)
        self._core.counters.num_tokens_sampled += 1
        if self._observer is not None:
            computation.bring_times_up_to_date()
            self._observer.observe_tokens(sequence, 1, now)
        if request.times.first_token is None:
            request.times.first_token = now
        computation.note_token(now)
        finish = ending(sequence)
        if finish is not None:
            self._core.finish(sequence, finish)
        logprobs = None
        if params.logprobs is not None:
            logprobs = (results.logprob(index, params),)
        return SequenceOutput(sequence, (token,), logprobs, finish)
