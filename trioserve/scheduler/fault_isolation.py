"""Fault isolation: finds the request that kills workers. Pure bookkeeping.

A request's content may be what kills the worker, and no other request should suffer for it twice.
So all requests in flight at a death become **suspects**. While there are suspects, only a part of
them is computed, the **probation group**: half of them at first. If the worker dies again, the
culprit is in the group, and the others are cleared. If every suspect of the group gets past the
point that it had reached at the death, the group is cleared and half of the rest follows. One
poisonous request among n is found in about log2(n) more deaths. The **culprit** is a request that
was alone in flight at two deaths in a row and made no progress in between; a single death may have
been an accident. So innocent requests lose nothing but time.

A point is a number of tokens. The steps that lead up to it prove nothing, because the end of a long
prompt may be what kills.

A worker that was **killed** from outside makes no request a suspect at first. The kernel may have
killed it for lack of memory, which looks the same from here. So a request that was in flight at
more than ``MAX_KILLS`` kills, without getting past its point at any of them, is treated as
after any other death.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from trioserve.requests.request import Request, Sequence, State
from trioserve.scheduler.sequence_state import SequenceState

MAX_KILLS = 2
"""Kills from outside at which a request may be in flight before it becomes a suspect."""
MAX_ALONE = 5
"""Deaths in a row, with one request in flight, before it is the culprit despite its progress."""

KillRecord = tuple[int, int]
"""Mark of a sequence that was in flight when its worker was killed, and number of kills."""
Flight = Mapping[Sequence, int]
"""Sequences in flight, and the number of tokens of each that would have been computed."""


@attrs.frozen
class Verdict:
    """A finding after a death: the culprit, or that the suspects became fewer."""

    culprit: Request | None = None
    narrowed: bool = False


@attrs.define(eq=False)
class FaultIsolation:
    """The suspects, by request: its sequences share a prompt and end together."""

    _marks: dict[Sequence, int] = attrs.field(init=False, factory=dict)
    """Number of tokens past which each suspect sequence is cleared."""
    _probation: dict[Request, None] = attrs.field(init=False, factory=dict)
    _alone: Request | None = attrs.field(init=False, default=None)
    """The only suspect, if it was alone in flight at the last death."""
    _num_alone: int = attrs.field(init=False, default=0)
    """Deaths in a row at which it was alone."""
    _progressed: bool = attrs.field(init=False, default=False)
    """True if an output of a suspect has got past its mark since the last death."""
    _killed: dict[Sequence, KillRecord] = attrs.field(init=False, factory=dict)
    """Sequences in flight when the worker was killed: mark, and number of kills."""

    @property
    def suspects(self) -> list[Request]:
        """Requests that may be the culprit."""
        return list(dict.fromkeys(sequence.request for sequence in self._marks))

    @property
    def probation(self) -> list[Request]:
        """Requests that alone may be computed; empty if all may."""
        return list(self._probation)

    @property
    def restricts(self) -> bool:
        """True if some requests have to wait."""
        return bool(self._probation)

    def may_run(self, request: Request) -> bool:
        """Return True if ``request`` may be computed now."""
        return not self._probation or request in self._probation

    def on_death(self, flight: Flight) -> Verdict:
        """Judge a death or failure of the worker with these sequences in flight."""
        in_flight = dict.fromkeys(sequence.request for sequence in flight)
        before = dict.fromkeys(self.suspects)
        again = [request for request in in_flight if request in before]
        if again == [self._alone] == list(in_flight):
            progressed = self._progressed or any(
                mark > self._marks.get(sequence, mark) for sequence, mark in flight.items()
            )
            self._num_alone += 1
            if not progressed or self._num_alone > MAX_ALONE:
                self._set_marks({})
                return Verdict(culprit=again[0])
        else:
            self._num_alone = 1
        suspects = dict.fromkeys(again or in_flight)
        marks = {
            sequence: max(mark, self._marks.get(sequence, 0))
            for sequence, mark in flight.items()
            if sequence.request in suspects and sequence.state is not State.FINISHED
        }
        if not marks:
            return Verdict()
        self._set_marks(marks)
        self._alone = next(iter(in_flight)) if len(in_flight) == 1 else None
        return Verdict(narrowed=bool(again) and len(again) < len(before))

    def on_kill(self, flight: Flight) -> Verdict:
        """Judge a kill from outside, maybe by the kernel, with these sequences in flight."""
        for sequence, mark in flight.items():
            if sequence.state is not State.FINISHED:
                before, kills = self._killed.get(sequence, (mark, 0))
                self._killed[sequence] = (mark, 1) if mark > before else (before, kills + 1)
        if any(kills > MAX_KILLS for _, kills in self._killed.values()):
            return self.on_death(flight)
        return Verdict()

    def on_step(self, seq_states: Iterable[SequenceState]) -> None:
        """Clear the sequences of a completed step that got past their marks."""
        if not self._marks and not self._killed:
            return
        for seq_state in seq_states:
            sequence, computed = seq_state.sequence, seq_state.computed
            if sequence in self._killed and computed >= self._killed[sequence][0]:
                del self._killed[sequence]
            if sequence in self._marks and computed >= self._marks[sequence]:
                self._clear(sequence)

    def take_kills(self, sequences: Iterable[Sequence]) -> dict[Sequence, KillRecord]:
        """Remove and return the records of sequences that go to another worker."""
        found = {each: self._killed.pop(each, None) for each in sequences}
        return {each: record for each, record in found.items() if record is not None}

    def add_kills(self, records: Mapping[Sequence, KillRecord]) -> None:
        """Add the records of sequences that come from another worker."""
        self._killed.update(records)

    def forget(self, sequence: Sequence) -> None:
        """Forget ``sequence``, which has finished."""
        self._killed.pop(sequence, None)
        if sequence in self._marks:
            self._clear(sequence)

    def check(self) -> None:
        """Assert that there is a probation group exactly while there are suspects."""
        assert bool(self._marks) == bool(self._probation), "suspects without a probation group"
        assert all(sequence.state is not State.FINISHED for sequence in self._marks)
        assert all(sequence.state is not State.FINISHED for sequence in self._killed)
        suspects = dict.fromkeys(self.suspects)
        assert not self._probation or any(request in suspects for request in self._probation)

    def _clear(self, sequence: Sequence) -> None:
        del self._marks[sequence]
        self._progressed = True
        if not self._marks:
            self._alone = None
        suspects = dict.fromkeys(self.suspects)
        if not any(request in suspects for request in self._probation):
            self._begin_probation()

    def _set_marks(self, marks: dict[Sequence, int]) -> None:
        self._marks, self._alone, self._progressed = marks, None, False
        self._begin_probation()

    def _begin_probation(self) -> None:
        # Requests without a grammar come first, because a grammar has to be compiled again.
        suspects = sorted(self.suspects, key=lambda request: request.params.grammar is not None)
        self._probation = dict.fromkeys(suspects[: (len(suspects) + 1) // 2])
