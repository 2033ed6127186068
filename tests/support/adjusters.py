"""A test :class:`gpu.sampling.adjustments.Adjuster` with masks that depend on the last token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch

from gpu._util.upload import upload
from gpu.sampling.adjustments import Adjustment, Logits
from gpu.slots import Slot
from trioserve.protocol.sampling import SamplerParams

__all__ = ["CLASSES", "ToyAdjuster", "chained", "follows"]

CLASSES = 7


def follows(token: int, last: int) -> bool:
    """Return whether a chained sequence may have ``token`` behind ``last``."""
    return token % CLASSES == (3 * last + 1) % CLASSES


def chained(params: SamplerParams, **changes: Any) -> SamplerParams:
    """Return ``params`` of a sequence in which each token :func:`follows` the one before."""
    return attrs.evolve(params, extra_args={"chain": True, **changes})


@attrs.define
class ToyAdjuster:
    """Reads ``extra_args``.

    ``chain``: only tokens that :func:`follows` the last; ``length``: after so many tokens of output
    nothing may follow; ``bias``: added to the logits of even tokens.
    """

    vocab_size: int
    log: list[str] = attrs.field(factory=list)
    """Record of opened and closed slots."""

    def open(self, slot: Slot) -> None:
        self.log.append(f"open {slot.number}")

    def close(self, number: int) -> None:
        self.log.append(f"close {number}")

    def adjusts(self, slot: Slot) -> bool:
        return bool(slot.sampler.extra_args)

    def needs_last_token(self, slot: Slot) -> bool:
        return "chain" in slot.sampler.extra_args

    def adjustment(self, logits: Logits, slots: Sequence[Slot]) -> Adjustment:
        assert logits.shape == (len(slots), self.vocab_size)
        bias = np.zeros(logits.shape, dtype=np.float32)
        allowed = np.ones((len(slots), -(-self.vocab_size // 32) * 32), dtype=np.uint8)
        for row, slot in enumerate(slots):
            args = slot.sampler.extra_args
            bias[row, ::2] = args.get("bias", 0.0)
            if "chain" in args and not slot.stopped:
                tokens = slot.tokens.tolist()
                assert min(tokens) >= 0, "an adjustment was made before its token was known"
                if len(tokens) - slot.prompt_length >= args.get("length", 1000):
                    allowed[row] = 0
                ids = np.arange(allowed.shape[1])
                allowed[row] &= ids % CLASSES == (3 * tokens[-1] + 1) % CLASSES
        bits = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
        return Adjustment(
            bias=upload(bias, torch.device(logits.device)),
            bitmask=bits,
        )
