"""Counts of each sequence that holds a slot: a column for each count, indexed by slot.

In most steps most sequences do the same: they compute one token and draw the next. With columns,
such a step costs a few operations on whole arrays instead of a visit to every sequence. So the
numbers live here, and :class:`~trioserve.scheduler.sequence_state.SequenceState` reads and writes
them by its slot. Special wishes of sequences (log-probabilities, several outputs, an end) are
handled one by one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trioserve.protocol.wire import ints

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

CLOSED = 0
"""Generation of a free slot; the first real one is 1."""


class TokenCounts:
    """The columns, each [number of slots]. The entries of a free slot mean nothing.

    Args:
        num_slots: Number of slots.
        vocab_size: Size of the vocabulary.
        one_row_in_flight: True if every row that draws waits for the result of the one before.
    """

    def __init__(self, num_slots: int, vocab_size: int, *, one_row_in_flight: bool = False) -> None:
        self._one_row_in_flight = one_row_in_flight
        self.length = np.zeros(num_slots, dtype=np.int64)
        self.planned = np.zeros(num_slots, dtype=np.int64)
        self.computed = np.zeros(num_slots, dtype=np.int64)
        self.last_plan = np.zeros(num_slots, dtype=np.int64)
        """The four columns above belong to
        :class:`~trioserve.scheduler.sequence_state.SequenceState`.
        """
        self.limit = np.zeros(num_slots, dtype=np.int64)
        """Number of tokens at which the sequence ends by length."""
        self.room = np.zeros(num_slots, dtype=np.int64)
        """Number of tokens that the pages in the block table hold."""
        self.generation = np.zeros(num_slots, dtype=np.int64)
        self.decodes = np.zeros(num_slots, dtype=np.bool_)
        """True if all known tokens have been given to plans, except the next one to be drawn."""
        self.unsettled = np.zeros(num_slots, dtype=np.bool_)
        """The next row waits for the result of the last one, or for other beams."""
        self.waits = np.zeros(num_slots, dtype=np.bool_)
        """True if each row waits for the result of the one before: a beam's."""
        self.leaves = np.zeros(num_slots, dtype=np.bool_)
        """True if another worker computes all tokens after the first."""
        self.may_draft = np.zeros(num_slots, dtype=np.bool_)
        """True unless the request wants no draft tokens."""
        self.plain = np.zeros(num_slots, dtype=np.bool_)
        """True if only tokens are wanted of a row, and the request has one sequence."""
        self.last_token = np.full(num_slots, np.nan)
        """Time of the newest token, in seconds; NaN before the first one in this slot."""
        self._stops = np.zeros(vocab_size, dtype=np.int32)
        """Number of the sets below that contain each token."""
        self._stop_sets: dict[bytes, int] = {}
        """Number of open slots with each set of stop ids; outputs of a request share theirs."""

    def open(
        self,
        slot: int,
        generation: int,
        *,
        limit: int,
        plain: bool,
        stop_ids: bytes,
        waits: bool = False,
        leaves: bool = False,
        may_draft: bool = True,
    ) -> None:
        """Open ``slot`` for a sequence. The caller sets the sequence's own counts."""
        self.generation[slot] = generation
        self.limit[slot] = limit
        self.plain[slot] = plain
        self.waits[slot] = waits
        self.leaves[slot] = leaves
        self.may_draft[slot] = may_draft
        self.decodes[slot] = self.unsettled[slot] = False
        self.last_token[slot] = np.nan
        slots = self._stop_sets.get(stop_ids, 0)
        self._stop_sets[stop_ids] = slots + 1
        if not slots:
            self._stops[self._known(stop_ids)] += 1

    def close(self, slot: int, stop_ids: bytes) -> None:
        """Close ``slot``."""
        self.generation[slot] = CLOSED
        self._stop_sets[stop_ids] -= 1
        if not self._stop_sets[stop_ids]:
            del self._stop_sets[stop_ids]
            self._stops[self._known(stop_ids)] -= 1

    def _known(self, stop_ids: bytes) -> npt.NDArray[np.int32]:
        """Return the ids that the vocabulary has."""
        ids = ints(stop_ids)
        return ids[(ids >= 0) & (ids < len(self._stops))]

    def may_stop(self, tokens: Ints) -> Bools:
        """Return a mask of ``tokens`` that are a stop id of any sequence; none may be negative."""
        return self._stops[tokens] > 0

    def advance(self, slots: Ints, plan: int) -> None:
        """Count a row of one token in ``plan`` for each of ``slots``, all of which decode."""
        self.planned[slots] += 1
        self.length[slots] += 1
        self.last_plan[slots] = plan
        self.note_draws(slots)

    def note_draws(self, slots: Ints) -> None:
        """Note rows that draw a token for each of ``slots``."""
        self.unsettled[slots] |= self.waits[slots] | self._one_row_in_flight

    def note_drawn(self, slots: Ints) -> None:
        """Note the results of rows that drew: the next row waits no more, unless it is a beam's."""
        if self._one_row_in_flight:
            self.unsettled[slots] = self.waits[slots]

    def settle(self, slots: Ints, extra: Ints) -> None:
        """Count ``extra`` tokens that rows of ``slots`` brought after their first.

        Their KV was computed in the same step, but for the last one's.
        """
        self.length[slots] += extra
        self.planned[slots] += extra
        self.computed[slots] += extra
