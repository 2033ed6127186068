"""The hold of decodes while a burst of prompts is computed.

If many prompts come at once, the first of them decode while the others are still computed. Steps
with few decodes are inefficient, and all streams get their tokens late, many times in a row. So if
all prompts of a burst can be computed within :data:`LONGEST` seconds of its beginning, decodes are
held meanwhile. Each stream then has one long gap instead of many middling ones. It ends no later,
because the prompts have to be computed in any case, and the prompts' first tokens come sooner.

Streams that ran before the burst gain nothing by a hold, and are held for :data:`BRIEF` seconds at
most. They aren't held for prompts that take less time than a step by itself, such as requests that
continue here with most of their tokens in the prefix cache.

Holds are rare and short. In the long run at most one gap in :data:`EVERY` becomes long, and as many
steps come between two holds of the same stream, so the 99th percentile doesn't show it. Nor is a
stream held longer than it has gone on since its last hold, so a long load of prompts halves its
rate at most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import numpy as np

from trioserve.scheduler.prompt_share import PromptWork, stretch_of
from trioserve.scheduler.step_time import FIXED, StepTimeModel
from trioserve.scheduler.token_counts import Ints

BURST = 4.0
"""Stretch of a prompt from which prompts count as a burst."""
LONGEST = 5.0
"""Most seconds of a hold, and from the first prompt's arrival to the hold's end."""
BRIEF = 1.0
"""Most seconds of a hold of streams that ran before the burst."""
FEW = 4
"""Most tokens of a stream that is taken to be of the burst itself."""
EVERY = 100
"""Gaps of streams of which one may become long, and steps between two holds of a stream."""
MOST = 64
"""Streams that may be held before there were any gaps."""


@attrs.define(eq=False)
class DecodeHold:
    """The holds of one scheduler's decodes.

    Times are in seconds on trio's clock. Streams are numbers, no two of which are ever the same.
    """

    _began: float | None = attrs.field(init=False, default=None)
    """Time of the present hold's beginning; None without one."""
    _ended: float = attrs.field(init=False, default=-math.inf)
    """Time of the last hold's end."""
    _longest: float = attrs.field(init=False, default=LONGEST)
    """Most seconds of the present hold."""
    _held: Ints = attrs.field(init=False, factory=lambda: np.empty(0, np.int64))
    """Streams of the present hold, or of the last one."""
    _gaps: int = attrs.field(init=False, default=MOST * EVERY)
    """Gaps of streams, but for :data:`EVERY` for each that holds have made long."""
    _steps: int = attrs.field(init=False, default=EVERY)
    """Steps with decodes since the last hold."""

    def is_possible(self, streams: Ints) -> bool:
        """Return True if there is a hold, or ``streams`` may be held."""
        return self._began is not None or self._steps >= EVERY or self._are_new(streams)

    def is_due(
        self,
        model: StepTimeModel,
        prompts: Sequence[PromptWork],
        streams: Ints,
        now: float,
        most: float = LONGEST,
    ) -> bool:
        """Return True if the next step should hold the decodes.

        Args:
            model: Model of the step's time.
            prompts: All prompts that wait or are being computed; they are streams soon.
            streams: Streams that decode.
            now: Time.
            most: Most seconds of a hold that begins now.
        """
        if not (prompts and model.is_known and self.is_possible(streams)):
            return False
        began, longest = self._began, self._longest
        if began is None:
            began, longest = now, self._longest_of(streams, now, most)
        passed = max(now - began, *(prompt.waited for prompt in prompts))
        seconds = sum(prompt.seconds(model) for prompt in prompts)
        if passed + seconds > longest:
            return False
        if self._began is not None:
            return True
        if most < LONGEST and seconds <= model.coefficients[FIXED]:
            return False
        has_gaps = self._gaps >= EVERY * (len(streams) + len(prompts))
        return has_gaps and stretch_of(model, prompts) >= BURST

    def note_hold(self, held: Ints, now: float, most: float = LONGEST) -> None:
        """Note a planned step for which the streams ``held`` are held; ``most`` as before it."""
        if self._began is None:
            self._longest = self._longest_of(held, now, most)
            self._began = now
        self._held = held

    def note_step(self, num_decodes: int, now: float) -> None:
        """Note a planned step without a hold, and its number of decodes."""
        if self._began is not None:
            self._gaps -= EVERY * len(self._held)
            self._began, self._ended, self._steps = None, now, 0
        self._gaps = min(self._gaps + num_decodes, MOST * EVERY)
        self._steps += num_decodes > 0

    def _are_new(self, streams: Ints) -> bool:
        """Return True if none of ``streams`` was held by the last hold."""
        return not np.isin(streams, self._held).any()

    def _longest_of(self, streams: Ints, now: float, most: float) -> float:
        """Return the most seconds of a hold of ``streams`` that begins now."""
        return most if self._are_new(streams) else min(now - self._ended, most)
