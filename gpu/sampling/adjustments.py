"""What is done to a row's logits before a token is drawn, besides what the sampler knows itself.

The seam between the executors, which have the logits, and :mod:`gpu.constraints`, which knows the
masks and the user's logits processors. Step 5 of :mod:`trioserve.protocol.sampling`.
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
"""Torch's on a GPU, and on a CPU NumPy's, which are there without torch."""


@attrs.frozen
class Adjustment:
    """For S rows; None where no row wants any."""

    bias: torch.Tensor | None = None
    """[S, vocab_size] float32, contiguous, on the logits' device: is added."""
    bitmask: npt.NDArray[np.int32] | None = None
    """[S, ceil(vocab_size / 32)], contiguous: token t may be drawn if bit t % 32 of word t // 32 is
    set. Applied after the bias."""


class Adjuster(Protocol):
    """Knows of every open slot what adjusts its draws."""

    def open(self, slot: Slot) -> None:
        """A slot is new, or has its tokens and parameters again; its number may have been used."""
        ...

    def close(self, number: int) -> None:
        """The slot with that number is closed. It may be unknown here."""
        ...

    def adjusts(self, slot: Slot) -> bool:
        """Whether the slot's draws are adjusted at all: asked once, when it is opened."""
        ...

    def needs_last_token(self, slot: Slot) -> bool:
        """Whether an adjustment depends on the slot's tokens, so that the last must be known."""
        ...

    def adjustment(self, logits: Logits, slots: Sequence[Slot]) -> Adjustment:
        """What to do to ``logits`` [S, vocab_size] float32, which aren't changed.

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
