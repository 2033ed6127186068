"""Adjustments of a row's logits before a draw, besides those by the sampler's own parameters.

This is the seam between the executors, which have the logits, and :mod:`gpu.constraints`, which has
the masks and the user's logits processors. It is step 5 of :mod:`trioserve.protocol.sampling`.
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
"""Torch's tensors on a GPU; NumPy's arrays on a CPU, where torch may not be loaded."""


@attrs.frozen
class Adjustment:
    """The adjustments of S rows; None where no row has any."""

    bias: torch.Tensor | None = None
    """[S, vocab_size] float32, contiguous, on the logits' device: added to the logits."""
    bitmask: npt.NDArray[np.int32] | None = None
    """[S, ceil(vocab_size / 32)], contiguous: token t may be drawn if bit t % 32 of word t // 32 is
    set. Applied after the bias."""


class Adjuster(Protocol):
    """The adjustments of every open slot's draws."""

    def open(self, slot: Slot) -> None:
        """Take note of a slot just opened; its number may have been used before."""
        ...

    def close(self, number: int) -> None:
        """Forget the slot with that number. It may be unknown here."""
        ...

    def adjusts(self, slot: Slot) -> bool:
        """Return whether the slot's draws are adjusted; called once, when the slot is opened."""
        ...

    def needs_last_token(self, slot: Slot) -> bool:
        """Return whether an adjustment depends on the slot's tokens, the last one included."""
        ...

    def adjustment(self, logits: Logits, slots: Sequence[Slot]) -> Adjustment:
        """Return the adjustment of ``logits`` [S, vocab_size] float32, which aren't changed.

        Each slot's tokens are those before the one to be drawn. All are known, unless the slot
        doesn't need the last one. Rows of slots without adjustments, and of those that have
        stopped, are left as they are.
        """
        ...


class NoAdjuster:
    """An :class:`Adjuster` that adjusts nothing."""

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
