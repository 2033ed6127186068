"""Beams: the sequences that hold the beams of beam searches.

Each beam of a search is held by a sequence of the request; if the beams outnumber the outputs,
spare sequences hold the others. A beam is computed like any sequence, but its next row waits until
all beams of the search have their continuations (:mod:`~.beam_search`). Then one of a beam's
continuations is held by the beam's own sequence, which goes on with its pages. Each further one is
a **fork**: a sequence whose beam has ended waits with the fork's tokens, and enters in the next
plan. It shares the full pages of the beam that it continues, and the last page is copied. A fork
for which there is no slot or page stays in the queue like a preempted sequence, and so does a beam
that is preempted.

A search can wait for a sequence in the queue while its other sequences hold pages. If nothing else
runs either, the youngest such search gives up its slots and pages, so the oldest always goes on;
or, before it, a search whose sequences may not enter now, such as one whose grammar is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs

from trioserve.observability.scheduler_statistics import Observer
from trioserve.protocol.errors import InvalidRequest
from trioserve.protocol.sampling import NO_TOKEN
from trioserve.requests.request import (
    Finish,
    FinishReason,
    Request,
    Sequence,
    SequenceOutput,
    State,
)
from trioserve.scheduler.beam_search import BeamSearch, Continuations, inherit
from trioserve.scheduler.plan_builder import PlanBuilder
from trioserve.scheduler.sequence_state import SequenceState
from trioserve.scheduler.state import SchedulerState, has_room
from trioserve.scheduler.stop_conditions import ending_of, ending_without_token

StopStringAtEnd = Callable[[Request, list[int]], str | None]
"""Function that returns the stop string that the last token of an output completes, if any."""


@attrs.frozen(eq=False)
class _Found:
    """The result of a beam's row."""

    stay: int
    """Stay of the sequence in a slot (:attr:`SequenceState.num_stays`) that it was computed in."""
    token: int
    """Token that the worker has drawn, and appended to the slot."""
    continuations: Continuations


@attrs.frozen(eq=False)
class _Fork:
    """A sequence that is to continue the beam of another one."""

    child: SequenceState
    parent: SequenceState
    stay: int
    """Stay of the parent in its slot."""


@attrs.define(eq=False)
class BeamGroup:
    """The beam search of one request, and the sequences that hold its beams."""

    search: BeamSearch
    holders: list[Sequence]
    """The sequence of each beam."""
    _found: dict[Sequence, _Found] = attrs.field(init=False, factory=dict)

    @classmethod
    def of(
        cls, request: Request, max_tokens: int, stop_string_at_end: StopStringAtEnd | None
    ) -> BeamGroup:
        """Return the group of ``request``; its first sequence computes the prompt."""
        first = request.sequences[0]

        def ending(output_ids: list[int]) -> Finish | None:
            finish = ending_of(first, output_ids)
            if finish is not None and finish.reason is FinishReason.STOP:
                return finish
            stop = None
            if request.params.stop and stop_string_at_end is not None:
                stop = stop_string_at_end(request, output_ids)
            return finish if stop is None else Finish(FinishReason.STOP, stop_reason=stop)

        return cls(BeamSearch(params=request.params, max_tokens=max_tokens, ending=ending), [first])

    def add(self, seq_state: SequenceState, token: int, continuations: Continuations) -> None:
        """Add the result of a beam that holds a slot."""
        self._found[seq_state.sequence] = _Found(seq_state.num_stays, token, continuations)

    def forget_results(self) -> None:
        """Forget the results of beams: the search goes on with another worker."""
        self._found.clear()

    def waits(self, sequence: Sequence) -> bool:
        """Return True if the result of the sequence's beam is there, and the next beams aren't.

        A beam that has lost its slot is computed again.
        """
        found, seq_state = self._found.get(sequence), sequence.seq_state
        return found is not None and seq_state.is_in_its(found.stay)

    @property
    def is_ready(self) -> bool:
        """True if the next beams can be chosen."""
        return all(each.seq_state is not None and self.waits(each) for each in self.holders)

    def choose(self) -> dict[Sequence, int]:
        """Choose the next beams; return the drawn token of each sequence that held one."""
        found, self._found = self._found, {}
        self.search.choose([found[each].continuations for each in self.holders])
        return {each: found[each].token for each in self.holders}


@attrs.define(eq=False)
class Beams:
    """The beam searches of a scheduler."""

    _state: SchedulerState
    _observer: Observer | None
    _forks: list[_Fork] = attrs.field(init=False, factory=list)
    _stale: list[tuple[SequenceState, int]] = attrs.field(init=False, factory=list)
    """Sequences with another last token than the worker has drawn, and their stays."""

    def take(
        self, seq_state: SequenceState, token: int, found: Continuations, now: float
    ) -> list[SequenceOutput]:
        """Take the result of a beam that holds its slot; choose the next beams if it was the last.

        Returns:
            The outputs, if the search is over.
        """
        group = _group_of(seq_state.sequence.request)
        group.add(seq_state, token, found)
        if not group.is_ready:
            return []
        drawn = group.choose()
        if group.search.is_over:
            return self._finish(seq_state.sequence.request, group, now)
        self._assign(seq_state.sequence.request, group, drawn)
        return []

    def _assign(self, request: Request, group: BeamGroup, drawn: dict[Sequence, int]) -> None:
        """Give the chosen beams to sequences."""
        beams, before = group.search.beams, group.holders
        continued, forked = inherit(beams, before)
        for place, sequence in continued.items():
            self._go_on(sequence, beams[place].tokens[-1], drawn[sequence])
        going_on = set(continued.values())
        free = [each for each in request.all_sequences if each not in going_on]
        for place in forked:
            child, parent = free.pop(0), before[beams[place].parent].seq_state
            self._state.restart(child.seq_state, list(beams[place].tokens), parent)
            self._forks.append(_Fork(child.seq_state, parent, parent.num_stays))
            continued[place] = child
        group.holders = [continued[place] for place in range(len(beams))]
        for sequence in free:
            if sequence.seq_state.holds_slot:
                self._state.hold_back(sequence.seq_state)

    def _go_on(self, sequence: Sequence, token: int, drawn: int) -> None:
        """Let a sequence continue its beam with ``token``, where the worker has ``drawn``."""
        seq_state = sequence.seq_state
        sequence.output_ids.append(token)
        if token == drawn:
            self._state.memory.counts.unsettled[seq_state.slot] = False
        else:
            self._stale.append((seq_state, seq_state.num_stays))

    def _finish(self, request: Request, group: BeamGroup, now: float) -> list[SequenceOutput]:
        """End a search that is over: its best outputs are those of the request."""
        best = group.search.complete[: request.params.n]
        if len(best) < len(request.sequences):
            return self._state.finish_all(request, _too_few(request, len(best)))
        outputs: list[SequenceOutput] = []
        for sequence, complete in zip(request.sequences, best, strict=True):
            if sequence.state is State.FINISHED:
                continue
            tokens, entries = complete.beam.tokens, complete.beam.entries
            if self._observer is not None:
                self._observer.observe_tokens(sequence, len(tokens), now)
            if request.times.first_token is None:
                request.times.first_token = now
            score = float(complete.beam.score)
            finish = attrs.evolve(complete.finish, beam_logprob=score)
            self._state.finish(sequence, finish)
            sequence.output_ids = tokens
            sequence.last_token = request.times.last_token = now
            self._state.counters.num_tokens_sampled += len(tokens)
            logprobs = None if request.params.logprobs is None else entries
            outputs.append(SequenceOutput(sequence, tuple(tokens), logprobs, finish))
        return outputs

    # ---- in a plan

    def stale(self) -> list[SequenceState]:
        """Return the running sequences with another last token than the worker has drawn."""
        self._stale = [each for each in self._stale if each[0].is_in_its(each[1])]
        return [seq_state for seq_state, _ in self._stale]

    def reopen(self, seq_state: SequenceState, builder: PlanBuilder) -> None:
        """Tell the worker the tokens of a sequence, by a new slot with the same pages."""
        self._state.running.remove(seq_state)
        self._state.memory.change_slot(seq_state)
        self._state.running.add(seq_state)
        builder.open(seq_state)

    def enter_forks(
        self, builder: PlanBuilder, may_enter: Callable[[SequenceState], bool]
    ) -> Iterator[SequenceState]:
        """Let forks enter, as far as there is room for them; yield each before the next."""
        state = self._state
        forks, self._forks = self._forks, []
        for fork in forks:
            if self._is_valid(fork) and may_enter(fork.child) and has_room(state, builder):
                match = state.memory.match_fork(fork.child, fork.parent, builder.number)
                if state.memory.fits(fork.child, match, state.running.slots):
                    state.memory.enter(fork.child, match, copied_from=fork.parent)
                    state.admit(fork.child)
                    builder.open(fork.child)
                    yield fork.child
                else:
                    fork.child.namespace = fork.child.own_namespace

    def _is_valid(self, fork: _Fork) -> bool:
        """Return True if the child still waits and the parent still has the pages."""
        child, parent = fork.child, fork.parent
        waits = child.sequence.state is State.WAITING and not child.is_held
        return waits and parent.is_in_its(fork.stay)

    def make_room(self, may_enter: Callable[[SequenceState], bool]) -> None:
        """Preempt all sequences of the youngest search that waits for one of them.

        One that would wait in any case comes first: if ``may_enter`` is false for its sequences,
        pages that a younger one gives up are of no use to it.

        To be called if all running sequences wait for others and nothing is in flight.
        """
        running = list(self._state.running)
        blocked = [each for each in running if not may_enter(each)]
        search = (blocked or running)[-1].sequence.request
        for each in reversed(search.all_sequences):
            if each.seq_state is not None and each.seq_state.holds_slot:
                self._state.preempt(each.seq_state)


def _group_of(request: Request) -> BeamGroup:
    group = request.beams
    assert isinstance(group, BeamGroup)
    return group


def _too_few(request: Request, found: int) -> Finish:
    """Return the end of a search that has found fewer outputs than the request wants."""
    if not found:
        return ending_without_token(request.sequences[0], NO_TOKEN)
    n = request.params.n
    error = InvalidRequest(
        f"what the request allows leaves {found} outputs for its beams, and n is {n}", param="n"
    )
    return Finish(FinishReason.ERROR, error=error)
