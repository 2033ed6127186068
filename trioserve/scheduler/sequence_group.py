"""Sequence groups: one sequence of a request computes the prompt, the others share its pages.

The *leader* of a request is the first of its sequences that hasn't finished. Until a plan computes
the end of the leader's prompt, the others are **held back**: they wait, but outside the queue, so
that they take no turns. With the next plan they are queued, match the prompt's full pages in the
prefix cache, and compute what is left of the last page.

Every sequence that has to wait passes :meth:`SequenceGroups.enter`, which decides whether to hold
it back. So after the loss of a worker, with all pages gone, sequences are held back once more
unless the leader has an output by then. If the leader ends early, the next sequence leads.

Only the leader reports the log-probabilities, hidden states and logits of the prompt. Its row comes
in an earlier plan than any row of the others, so they are complete before the first output of any.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import attrs

from trioserve.requests.request import Request, Sequence, State
from trioserve.requests.tensors import NOTHING_MISSING, MissingRows
from trioserve.scheduler.sequence_state import NO_LOGPROBS, SequenceQueue, SequenceState


def leader_of(request: Request) -> Sequence | None:
    """Return the first sequence of ``request`` that hasn't finished."""
    return next((each for each in request.sequences if each.state is not State.FINISHED), None)


def _has_prompt_to_compute(leader: Sequence) -> bool:
    return leader.state is not State.DECODE and not leader.output_ids


def first_logprob(sequence: Sequence) -> int:
    """Return the position of the first prompt token for which ``sequence`` reports a
    log-probability.

    It is -1 if the sequence has none to report any more.
    """
    request = sequence.request
    wanted = request.prompt_logprobs
    if wanted is None or wanted.stop >= len(request.prompt_ids):
        return NO_LOGPROBS
    return wanted.stop if leader_of(request) is sequence else NO_LOGPROBS


def missing_rows(sequence: Sequence) -> MissingRows:
    """Return the output tensors' rows that ``sequence`` has to give next."""
    tensors = sequence.request.tensors
    if tensors is None:
        return NOTHING_MISSING
    return tensors.missing(sequence.index, leads=leader_of(sequence.request) is sequence)


@attrs.define(eq=False, repr=False)
class SequenceGroups:
    """The sequences held back, beside the queue ``waiting`` that they enter later."""

    _waiting: SequenceQueue
    _held: dict[Request, SequenceQueue] = attrs.field(init=False, factory=dict)
    """Queues by request; none is empty."""
    _num_held: int = attrs.field(init=False, default=0)
    _ready: list[Request] = attrs.field(init=False, factory=list)

    def __len__(self) -> int:
        return self._num_held

    def __iter__(self) -> Iterator[SequenceState]:
        return itertools.chain.from_iterable(self._held.values())

    def enter(self, seq_state: SequenceState) -> None:
        """Queue the sequence, or hold it back for its leader's pages."""
        sequence = seq_state.sequence
        request = sequence.request
        if len(request.all_sequences) > 1:
            leader = leader_of(request)
            if leader is not None and leader is not sequence and _has_prompt_to_compute(leader):
                self.hold_back(seq_state)
                return
        self._waiting.add(seq_state)

    def hold_back(self, seq_state: SequenceState) -> None:
        """Hold back a sequence that waits."""
        self._held.setdefault(seq_state.sequence.request, SequenceQueue()).add(seq_state)
        seq_state.is_held = True
        self._num_held += 1

    def on_prompt_planned(self, seq_state: SequenceState) -> None:
        """Note that the plan being built computes the end of a prompt.

        If no token is wanted, the others stay held back: they end with the leader. In a beam search
        they do until they get a beam.
        """
        request = seq_state.sequence.request
        if self._held and seq_state.sequence.max_tokens and request.beams is None:
            self._ready.append(request)

    def release(self) -> None:
        """Queue the sequences held back for a prompt that the finished plan completes."""
        for request in self._ready:
            for seq_state in self._held.pop(request, ()):
                seq_state.is_held = False
                self._num_held -= 1
                self._waiting.add(seq_state)
        self._ready.clear()

    def remove(self, seq_state: SequenceState) -> None:
        """Remove a sequence that is held back."""
        request = seq_state.sequence.request
        queue = self._held[request]
        queue.remove(seq_state)
        seq_state.is_held = False
        self._num_held -= 1
        if not queue:
            del self._held[request]

    def on_finished(self, request: Request) -> None:
        """Note that a sequence of ``request`` has finished; if it was the leader, queue the next
        one.

        The finished sequence's record must be gone by now.
        """
        if request not in self._held:
            return
        leader = leader_of(request)
        if leader is not None and leader.seq_state.is_held:
            seq_state = leader.seq_state
            self.remove(seq_state)
            self._waiting.add(seq_state)
