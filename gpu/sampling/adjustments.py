"""Adjustments of logits before sampling: masks, and the biases of logits processors.

This is the interface between the executors, which have the logits, and :mod:`gpu.constraints`. It
is step 5 of :mod:`trioserve.protocol.sampling`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from gpu.slots import Slot

if TYPE_CHECKING:
    import torch

Logits: TypeAlias = "torch.Tensor | npt.NDArray[np.float32]"
"""A torch tensor on a GPU, a NumPy array on a CPU, where torch may not be loaded."""


@attrs.frozen
class Adjustment:
    """The adjustments of S rows; a field is None if no row needs it."""

    bias: torch.Tensor | None = None
    """Added to the logits: [S, vocab_size] float32, contiguous, on the logits' device."""
    bitmask: npt.NDArray[np.int32] | None = None
    """Applied after the bias: [S, ceil(vocab_size / 32)], contiguous. Token t is allowed if bit
    t % 32 of word t // 32 is set."""


class Adjuster(Protocol):
    """Makes the adjustments of open slots."""

    def open(self, slot: Slot) -> None:
        """Set up the state of a slot just opened; its number may have been used before."""
        ...

    def close(self, number: int) -> None:
        """Drop the state of a slot, which may never have been opened."""
        ...

    def adjusts(self, slot: Slot) -> bool:
        """Return whether the slot's logits are adjusted; called once, when it is opened."""
        ...

    def needs_last_token(self, slot: Slot) -> bool:
        """Return whether the adjustment depends on the slot's last token."""
        ...

    def adjustment(self, logits: Logits, slots: Sequence[Slot]) -> Adjustment:
        """Return the adjustment of ``logits`` [S, vocab_size] float32, which stay unchanged.

        A slot's tokens are those before the one to sample. The last may be unknown if
        :meth:`needs_last_token` is false. Stopped slots, and those without adjustments, get none.
        """
        ...


class NoAdjuster:
    """An :class:`Adjuster` without adjustments."""

    def open(self, slot: Slot) -> None:
        """See :class:`Adjuster`."""

    def close(self, number: int) -> None:
        """See :class:`Adjuster`."""

    def adjusts(self, slot: Slot) -> bool:
        """See :class:`Adjuster`."""
        return False

    def needs_last_token(self, slot: Slot) -> bool:
        """See :class:`Adjuster`."""
        return False

    def adjustment(self, logits: Logits, slots: Sequence[Slot]) -> Adjustment:
        """See :class:`Adjuster`."""
        return Adjustment()
