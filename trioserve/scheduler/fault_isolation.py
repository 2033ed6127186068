"""Whose fault it is when a worker dies or a plan fails. Pure bookkeeping over what was in flight.

What a request asks for may be what kills the worker, and no other request should suffer for it
twice. So whoever was in flight becomes a **suspect**, and while there are suspects only a part of
them is computed, those **on trial**: half of them at first. If the worker dies again, it is one of
those, and the others are cleared; if each of those on trial gets past the point that it had come to
when the worker died, they are cleared and half of the rest is tried. One poisonous request among n
is found in about log2(n) more deaths. Who was alone in flight at two deaths in a row, and came no
further in between, is **guilty**: one may have been an accident. So nobody innocent loses anything
but time.

A point is a number of tokens: what kills may lie at the end of a long prompt, and the steps that
lead up to it prove nothing.

A worker that somebody **killed** makes nobody a suspect, unless it was the kernel, out of memory,
and that can't be told from here. Who has been in flight at more than ``KILLS_FORGIVEN`` kills and
got past none of them is treated as with any other death.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from trioserve.requests.request import Request, Sequence, State
from trioserve.scheduler.sequence_state import SequenceState

KILLS_FORGIVEN = 2
MAX_ALONE = 5
"""Deaths in a row that a request alone in flight is forgiven while some of its outputs come on."""

Flight = Mapping[Sequence, int]
"""Who was in flight, and how many tokens of each would have been computed."""


@attrs.frozen
class Verdict:
    """What a death has shown: who is guilty, or that fewer are suspects than before."""

    culprit: Request | None = None
    narrowed: bool = False


@attrs.define(eq=False)
class FaultIsolation:
    """The suspects, by request: its sequences share a prompt, and end together."""

    _marks: dict[Sequence, int] = attrs.field(init=False, factory=dict)
    """The suspects, and the number of tokens past which each is cleared."""
    _trial: dict[Request, None] = attrs.field(init=False, factory=dict)
    _alone: Request | None = attrs.field(init=False, default=None)
    """The only suspect there is, if nobody else was in flight at the last death."""
    _num_alone: int = attrs.field(init=False, default=0)
    """Deaths in a row at which it was."""
    _came_further: bool = attrs.field(init=False, default=False)
    """Whether one of its outputs has got past its mark since the last one."""
    _killed: dict[Sequence, tuple[int, int]] = attrs.field(init=False, factory=dict)
    """Who was in flight when the worker was killed: the same number, and how many times."""

    @property
    def suspects(self) -> list[Request]:
        """Who may be guilty."""
        return list(dict.fromkeys(sequence.request for sequence in self._marks))

    @property
    def probation(self) -> list[Request]:
        """Who alone may be computed; nobody if everybody may."""
        return list(self._trial)

    @property
    def restricts(self) -> bool:
        """Whether there is anybody who has to wait."""
        return bool(self._trial)

    def may_run(self, request: Request) -> bool:
        """Whether ``request`` may be computed now."""
        return not self._trial or request in self._trial

    def on_death(self, flight: Flight) -> Verdict:
        """The worker died, or failed, with these in flight."""
        in_flight = dict.fromkeys(sequence.request for sequence in flight)
        before = dict.fromkeys(self.suspects)
        again = [request for request in in_flight if request in before]
        if again == [self._alone] == list(in_flight):
            further = self._came_further or any(
                mark > self._marks.get(sequence, mark) for sequence, mark in flight.items()
            )
            self._num_alone += 1
            if not further or self._num_alone > MAX_ALONE:
                self._set_marks({})
                return Verdict(culprit=again[0])
        else:
            self._num_alone = 1
        accused = dict.fromkeys(again or in_flight)
        marks = {
            sequence: max(mark, self._marks.get(sequence, 0))
            for sequence, mark in flight.items()
            if sequence.request in accused and sequence.state is not State.FINISHED
        }
        if not marks:
            return Verdict()
        self._set_marks(marks)
        self._alone = next(iter(in_flight)) if len(in_flight) == 1 else None
        return Verdict(narrowed=bool(again) and len(again) < len(before))

    def on_kill(self, flight: Flight) -> Verdict:
        """The worker was killed from outside with these in flight: by the kernel, if by anybody."""
        for sequence, mark in flight.items():
            if sequence.state is not State.FINISHED:
                before, kills = self._killed.get(sequence, (mark, 0))
                self._killed[sequence] = (mark, 1) if mark > before else (before, kills + 1)
        if any(kills > KILLS_FORGIVEN for _, kills in self._killed.values()):
            return self.on_death(flight)
        return Verdict()

    def on_step(self, computations: Iterable[SequenceState]) -> None:
        """A step of these is done: clear who got past its mark."""
        if not self._marks and not self._killed:
            return
        for computation in computations:
            sequence, computed = computation.sequence, computation.computed
            if sequence in self._killed and computed >= self._killed[sequence][0]:
                del self._killed[sequence]
            if sequence in self._marks and computed >= self._marks[sequence]:
                self._clear(sequence)

    def forget(self, sequence: Sequence) -> None:
        """``sequence`` has finished."""
        self._killed.pop(sequence, None)
        if sequence in self._marks:
            self._clear(sequence)

    def check(self) -> None:
        """Assert that there are suspects on trial exactly while there are suspects."""
        assert bool(self._marks) == bool(self._trial), "suspects wait for no trial"
        assert all(sequence.state is not State.FINISHED for sequence in self._marks)
        assert all(sequence.state is not State.FINISHED for sequence in self._killed)
        suspects = dict.fromkeys(self.suspects)
        assert not self._trial or any(request in suspects for request in self._trial)

    def _clear(self, sequence: Sequence) -> None:
        del self._marks[sequence]
        self._came_further = True
        if not self._marks:
            self._alone = None
        suspects = dict.fromkeys(self.suspects)
        if not any(request in suspects for request in self._trial):
            self._begin_trial()

    def _set_marks(self, marks: dict[Sequence, int]) -> None:
        self._marks, self._alone, self._came_further = marks, None, False
        self._begin_trial()

    def _begin_trial(self) -> None:
        # A grammar has to be compiled again first: the trial begins with those that have none.
        suspects = sorted(self.suspects, key=lambda request: request.params.grammar is not None)
        self._trial = dict.fromkeys(suspects[: (len(suspects) + 1) // 2])
