"""The time of a step by the number of its tokens, measured on this machine."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 33, 48, 64)
"""Numbers of tokens that are measured when a model is loaded.

Kernels arrange products of more than 32 rows otherwise, so one more token may cost much there.
"""
_WEIGHT = 0.15
"""Weight of one more step in the running mean."""
_MOST_MOVED = 0.25
"""Most that a step's time counts as away from the mean, as a share of its measured time. A step
that was disturbed takes several times as long, and drafts would look better for a long time.
"""


class StepTimes:
    """Seconds of a step by tokens, from ``measured`` times of steps with a short context.

    Two things are learned from steps as they come (:meth:`observe`): what any step takes more than
    these, such as attention over a longer context, or less, if the machine was busy when they were
    measured; and what a draft costs beyond the time of one more token, such as its sampling.
    """

    def __init__(self, measured: Mapping[int, float]) -> None:
        sizes = sorted(measured)
        # More tokens never take less time; a larger time of fewer is one that was disturbed.
        seconds = np.minimum.accumulate([measured[size] for size in sizes][::-1])[::-1]
        self._seconds: list[float] = np.interp(range(sizes[-1] + 1), sizes, seconds).tolist()
        self._slope = 0.0
        """Seconds of one more token, beyond the largest size."""
        if len(sizes) > 1:
            self._slope = float(seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
        self._least = -self._seconds[1] / 2
        self._more = self._per_draft = 0.0

    def seconds(self, num_tokens: int, num_drafts: int = 0) -> float:
        """Return the expected time of a step of ``num_tokens`` tokens and ``num_drafts`` drafts."""
        time = self._measured(num_tokens + num_drafts) + max(self._more, self._least)
        return time + num_drafts * max(self._per_draft, 0.0)

    def observe(self, num_tokens: int, num_drafts: int, seconds: float) -> None:
        """Note the time of a step of ``num_tokens`` tokens and ``num_drafts`` drafts."""
        expected = self._measured(num_tokens + num_drafts)
        more = seconds - expected
        if num_drafts:
            per_draft = (more - self._more) / num_drafts
            self._per_draft = _moved(self._per_draft, per_draft, expected / num_drafts)
        else:
            self._more = _moved(self._more, more, expected)

    def _measured(self, num_tokens: int) -> float:
        beyond = num_tokens - len(self._seconds) + 1
        return self._seconds[-1] + self._slope * beyond if beyond > 0 else self._seconds[num_tokens]


def _moved(mean: float, value: float, scale: float) -> float:
    """Return the running mean with one more value; one far off counts as one that is less so."""
    most = _MOST_MOVED * scale
    return mean + _WEIGHT * min(max(value - mean, -most), most)
