"""Pooled vectors of prompts: the mean of a prompt's hidden states, or the last one.

A prompt may be computed in chunks over several steps, so the sum of its states so far is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from gpu.slots import PlanError, Row, Slot
from trioserve.protocol.wire import PooledPrompt, from_floats


@attrs.frozen(kw_only=True)
class PooledSpan:
    """The prompt tokens of one slot in a step, from position ``start`` on.

    Their hidden states are the step's ``first_hidden`` to ``stop_hidden`` - 1. ``is_last`` is true
    if the prompt ends with them.
    """

    slot: Slot
    start: int
    first_hidden: int
    stop_hidden: int
    is_last: bool


class PooledSlots:
    """The slots that request a pooled vector, and the sums of their hidden states so far.

    Arrays are NumPy arrays or torch tensors.
    """

    def __init__(self) -> None:
        self._sums: dict[int, Any] = {}
        """Slot -> [E] float32, or None before the first chunk."""

    def open(self, slot: Slot) -> None:
        """Add a slot just opened, if it requests a pooled vector."""
        self._sums.pop(slot.number, None)
        if slot.sampler.pooling:
            self._sums[slot.number] = None

    def close(self, number: int) -> None:
        """Drop a slot, if it is here."""
        self._sums.pop(number, None)

    def spans(self, rows: Sequence[Row], last_hidden: npt.NDArray[np.integer]) -> list[PooledSpan]:
        """Return the hidden states of a step to be pooled.

        ``last_hidden[i]`` is the index of row i's last hidden state in the step.
        """
        if not self._sums:
            return []
        return [
            PooledSpan(
                slot=row.slot,
                start=row.start,
                first_hidden=int(last) + 1 - row.count,
                stop_hidden=int(last) + 1,
                is_last=row.end == row.slot.prompt_length,
            )
            for row, last in zip(rows, last_hidden, strict=True)
            if row.slot.number in self._sums and row.end <= row.slot.prompt_length
        ]

    def take(self, span: PooledSpan, states: Any) -> Any:
        """Pool ``states`` [n, E] float32 of ``span``; return the vector [E] if it is the last span.

        Raises:
            PlanError: the mean lacks tokens that weren't computed for it, such as cached ones.
        """
        number = span.slot.number
        if span.slot.sampler.pooling == "last":
            return states[-1] if span.is_last else None
        before = self._sums[number]
        if before is None and span.start:
            raise PlanError("a mean is wanted of a prompt that isn't computed whole", number)
        total = states.sum(0) if before is None else before + states.sum(0)
        self._sums[number] = total
        return total / span.slot.prompt_length if span.is_last else None


def pooled_prompt(span: PooledSpan, vector: npt.NDArray[np.float32]) -> PooledPrompt:
    """Return the message with the ``vector`` [E] of the prompt that ``span`` completes."""
    return PooledPrompt(slot=span.slot.number, vector=from_floats(vector))
