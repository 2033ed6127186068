"""The hold of decodes while a burst of prompts is computed.

If many prompts come at once, the first of them decode while the others are still computed. Steps
with few decodes are inefficient, and all streams get their tokens late, many times in a row. So if
all prompts of a burst can be computed within :data:`LONGEST` seconds of its beginning, decodes are
held meanwhile. Each stream then has one long gap instead of many middling ones. It ends no later,
because the prompts have to be computed in any case, and the prompts' first tokens come sooner.

Holds are rare and short. At most one in :data:`EVERY` of the gaps since the last hold becomes long,
so the 99th percentile doesn't show it. And a hold takes at most as long as all steps since the last
one, so a long load of prompts halves the rate of streams at most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from trioserve.scheduler.prompt_share import PromptWork, stretch_of
from trioserve.scheduler.step_time import StepLoad, StepTimeModel

BURST = 4.0
"""Stretch of a prompt from which prompts count as a burst."""
LONGEST = 3.0
"""Most seconds of a hold, and from the first prompt's arrival to the hold's end."""
EVERY = 100
"""Gaps of streams of which one may become long."""


@attrs.define(eq=False)
class DecodeHold:
    """The holds of one scheduler's decodes. Times are as predicted, in seconds."""

    _held: float | None = attrs.field(init=False, default=None)
    """Time of the present hold so far; None without one."""
    _longest: float = attrs.field(init=False, default=LONGEST)
    """Most time of the present hold or the next one."""
    _gaps: float = attrs.field(init=False, default=math.inf)
    """Gaps of streams since the last hold: rows of decodes."""

    def is_due(self, model: StepTimeModel, prompts: Sequence[PromptWork], num_decodes: int) -> bool:
        """Return True if the next step should hold the decodes.

        Args:
            model: Model of the step's time.
            prompts: All prompts that wait or are being computed; they are streams soon.
            num_decodes: Number of streams that decode.
        """
        if not (prompts and model.is_known):
            return False
        begun = max(self._held or 0.0, *(prompt.waited for prompt in prompts))
        if begun + sum(prompt.seconds(model) for prompt in prompts) > self._longest:
            return False
        if self._held is not None:
            return True
        num_held = num_decodes + len(prompts)
        return self._gaps >= EVERY * num_held and stretch_of(model, prompts) >= BURST

    def note(self, model: StepTimeModel, load: StepLoad, *, holds: bool) -> None:
        """Note a planned step, and whether decodes were held for it."""
        seconds = model.predict(load)
        if holds:
            self._held = (self._held or 0.0) + seconds
            return
        if self._held is not None:
            self._held, self._longest, self._gaps = None, 0.0, 0
        self._longest = min(self._longest + seconds, LONGEST)
        self._gaps += load.decodes
