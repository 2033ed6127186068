"""How far each sequence that holds a slot has come: a column for each count, indexed by slot.

In most steps most sequences do the same: they compute one token and draw the next. Columns let such
a step cost a few operations on whole arrays instead of a visit to every sequence, so the numbers
live here and :class:`~trioserve.scheduler.sequence_state.SequenceState` reads and writes them by
its slot. What only some sequences want (log-probabilities, siblings, an end) is done one by one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trioserve.protocol.wire import ints

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

CLOSED = 0
"""The generation of a slot that nobody holds; the first real one is 1."""


class TokenCounts:
    """The columns, each [number of slots]. What stands in a closed slot means nothing.

    Args:
        num_slots: how many there are.
        vocab_size: tokens are below it.
    """

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self.length = np.zeros(num_slots, dtype=np.int64)
        self.planned = np.zeros(num_slots, dtype=np.int64)
        self.computed = np.zeros(num_slots, dtype=np.int64)
        self.last_plan = np.zeros(num_slots, dtype=np.int64)
        """These four are a :class:`~trioserve.scheduler.sequence_state.SequenceState`'s."""
        self.limit = np.zeros(num_slots, dtype=np.int64)
        """Tokens at which the sequence ends by length."""
        self.room = np.zeros(num_slots, dtype=np.int64)
        """Tokens that the pages in the block table hold."""
        self.generation = np.zeros(num_slots, dtype=np.int64)
        self.decodes = np.zeros(num_slots, dtype=np.bool_)
        """All tokens known have been given to plans, but for the next one that is drawn."""
        self.unsettled = np.zeros(num_slots, dtype=np.bool_)
        """A row in flight may bring several tokens, so the next one waits for its result."""
        self.plain = np.zeros(num_slots, dtype=np.bool_)
        """Nothing but the token is wanted of a row, and there is one sequence in the request."""
        self.last_token = np.full(num_slots, np.nan)
        """When the newest token came, in seconds; NaN before the first one in this slot."""
        self._stops = np.zeros(vocab_size, dtype=np.int32)
        """In how many of the sets below each token is."""
        self._stop_sets: dict[bytes, int] = {}
        """The open slots' sets of stop ids, and how many slots have each: outputs share theirs."""

    def open(self, slot: int, generation: int, *, limit: int, plain: bool, stop_ids: bytes) -> None:
        """A sequence has got ``slot``. Its own counts are for the caller to set."""
        self.generation[slot] = generation
        self.limit[slot] = limit
        self.plain[slot] = plain
        self.decodes[slot] = self.unsettled[slot] = False
        self.last_token[slot] = np.nan
        slots = self._stop_sets.get(stop_ids, 0)
        self._stop_sets[stop_ids] = slots + 1
        if not slots:
            self._stops[self._known(stop_ids)] += 1

    def close(self, slot: int, stop_ids: bytes) -> None:
        """The sequence has left ``slot``."""
        self.generation[slot] = CLOSED
        self._stop_sets[stop_ids] -= 1
        if not self._stop_sets[stop_ids]:
            del self._stop_sets[stop_ids]
            self._stops[self._known(stop_ids)] -= 1

    def _known(self, stop_ids: bytes) -> npt.NDArray[np.int32]:
        """Return those of the ids that the vocabulary has."""
        ids = ints(stop_ids)
        return ids[(ids >= 0) & (ids < len(self._stops))]

    def may_stop(self, tokens: Ints) -> Bools:
        """Which of ``tokens``, none of them negative, are stop ids for anybody."""
        return self._stops[tokens] > 0

    def advance(self, slots: Ints, plan: int) -> None:
        """Each of ``slots``, all of which decode, has a row of one token in ``plan``."""
        self.planned[slots] += 1
        self.length[slots] += 1
        self.last_plan[slots] = plan

    def settle(self, slots: Ints, extra: Ints) -> None:
        """Count ``extra`` tokens that rows of ``slots`` brought after their first.

        Their KV was computed in the same step, but for the last one's.
        """
        self.length[slots] += extra
        self.planned[slots] += extra
        self.computed[slots] += extra
