"""Requests for several outputs: one sequence computes the prompt, the others then share its pages.

The *leader* of a request is the first of its sequences that hasn't finished. Until a plan computes
the end of the leader's prompt, the others are **held**: they are waiting like everybody else, but
stand in no line, so that they cost nobody a turn. From the next plan on they are in line, find the
prompt's full pages in the prefix cache, and compute what is left of the last page.

Whoever is to wait goes through :meth:`SequenceGroups.enter`, which knows whether there is something
to be held for. So after the loss of a worker, with all pages gone, they are held once more, unless
the leader had an output by then. If the leader ends early, the next one leads.

The leader alone reports the log-probabilities of the prompt. Its row comes in an earlier plan than
any row of the others, so they are complete before the first output of any.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import attrs

from trioserve.requests.request import Request, Sequence, State
from trioserve.scheduler.sequence_state import NO_LOGPROBS, SequenceQueue, SequenceState


def leader_of(request: Request) -> Sequence | None:
    """The first sequence of ``request`` that hasn't finished."""
    return next((each for each in request.sequences if each.state is not State.FINISHED), None)


def _has_prompt_to_compute(leader: Sequence) -> bool:
    return leader.state is not State.DECODE and not leader.output_ids


def first_logprob(sequence: Sequence) -> int:
    """The position of the first prompt token whose log-probability ``sequence`` is to report.

    -1 if it is to report none (any more).
    """
    request = sequence.request
    wanted = request.prompt_logprobs
    if wanted is None or wanted.stop >= len(request.prompt_ids):
        return NO_LOGPROBS
    return wanted.stop if leader_of(request) is sequence else NO_LOGPROBS


@attrs.define(eq=False, repr=False)
class SequenceGroups:
    """Who is held, beside the line ``waiting`` that they are let go into."""

    _waiting: SequenceQueue
    _held: dict[Request, SequenceQueue] = attrs.field(init=False, factory=dict)
    """Without empty lines."""
    _num_held: int = attrs.field(init=False, default=0)
    _ready: list[Request] = attrs.field(init=False, factory=list)

    def __len__(self) -> int:
        return self._num_held

    def __iter__(self) -> Iterator[SequenceState]:
        return itertools.chain.from_iterable(self._held.values())

    def enter(self, computation: SequenceState) -> None:
        """Put ``computation`` in line, or hold it for its leader's pages."""
        sequence = computation.sequence
        request = sequence.request
        if len(request.sequences) > 1:
            leader = leader_of(request)
            if leader is not None and leader is not sequence and _has_prompt_to_compute(leader):
                self._held.setdefault(request, SequenceQueue()).add(computation)
                computation.is_held = True
                self._num_held += 1
                return
        self._waiting.add(computation)

    def on_prompt_planned(self, computation: SequenceState) -> None:
        """The plan in the making computes the end of the prompt.

        Where no token is wanted, nobody is let go: they end with the leader.
        """
        if self._held and computation.sequence.max_tokens:
            self._ready.append(computation.sequence.request)

    def release(self) -> None:
        """The plan is made: those whose prompt it completes may come into the next one."""
        for request in self._ready:
            for computation in self._held.pop(request, ()):
                computation.is_held = False
                self._num_held -= 1
                self._waiting.add(computation)
        self._ready.clear()

    def remove(self, computation: SequenceState) -> None:
        """Forget ``computation``, which is held."""
        request = computation.sequence.request
        line = self._held[request]
        line.remove(computation)
        computation.is_held = False
        self._num_held -= 1
        if not line:
            del self._held[request]

    def on_finished(self, request: Request) -> None:
        """A sequence of ``request`` has finished: if it led those who are held, the next one does.

        Its compute record must be gone by now.
        """
        if request not in self._held:
            return
        leader = leader_of(request)
        if leader is not None and leader.compute.is_held:
            computation = leader.compute
            self.remove(computation)
            self._waiting.add(computation)
