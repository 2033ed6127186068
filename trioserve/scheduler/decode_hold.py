"""The hold of decodes while a burst of prompts is computed.

If many prompts come at once, the first of them decode while the others are still computed. Steps
with few decodes are inefficient, and all streams get their tokens late, many times in a row. So if
all prompts of a burst can be computed within :data:`LONGEST` seconds of its beginning, decodes are
held meanwhile. Each stream then has one long gap instead of many middling ones. It ends no later,
because the prompts have to be computed in any case, and the prompts' first tokens come sooner.

Holds are rare and short. In the long run at most one gap in :data:`EVERY` becomes long, and between
two holds are as many steps, so the 99th percentile doesn't show it. And a hold takes at most as
long as the time since the last one, so a long load of prompts halves the rate of streams at most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from trioserve.scheduler.prompt_share import PromptWork, stretch_of
from trioserve.scheduler.step_time import StepTimeModel

BURST = 4.0
"""Stretch of a prompt from which prompts count as a burst."""
LONGEST = 3.0
"""Most seconds of a hold, and from the first prompt's arrival to the hold's end."""
EVERY = 100
"""Gaps of streams of which one may become long, and steps with decodes between two holds."""
MOST = 64
"""Streams that may be held before there were any gaps."""


@attrs.define(eq=False)
class DecodeHold:
    """The holds of one scheduler's decodes. Times are in seconds on trio's clock."""

    _began: float | None = attrs.field(init=False, default=None)
    """Time of the present hold's beginning; None without one."""
    _ended: float = attrs.field(init=False, default=-math.inf)
    """Time of the last hold's end."""
    _num_held: int = attrs.field(init=False, default=0)
    """Streams of the present hold."""
    _gaps: int = attrs.field(init=False, default=MOST * EVERY)
    """Gaps of streams, but for :data:`EVERY` for each that holds have made long."""
    _steps: int = attrs.field(init=False, default=EVERY)
    """Steps with decodes since the last hold."""

    @property
    def is_possible(self) -> bool:
        """True if there is a hold, or one could begin."""
        return self._began is not None or self._steps >= EVERY

    def is_due(
        self, model: StepTimeModel, prompts: Sequence[PromptWork], num_decodes: int, now: float
    ) -> bool:
        """Return True if the next step should hold the decodes.

        Args:
            model: Model of the step's time.
            prompts: All prompts that wait or are being computed; they are streams soon.
            num_decodes: Number of streams that decode.
            now: Time.
        """
        if not (prompts and model.is_known and self.is_possible):
            return False
        began = now if self._began is None else self._began
        passed = max(now - began, *(prompt.waited for prompt in prompts))
        seconds = passed + sum(prompt.seconds(model) for prompt in prompts)
        if seconds > min(began - self._ended, LONGEST):
            return False
        if self._began is not None:
            return True
        has_gaps = self._gaps >= EVERY * (num_decodes + len(prompts))
        return has_gaps and stretch_of(model, prompts) >= BURST

    def note(self, num_decodes: int, num_held: int, now: float) -> None:
        """Note a planned step: its decodes, and the number of streams that are held for it."""
        if num_held:
            self._began = now if self._began is None else self._began
            self._num_held = max(self._num_held, num_held)
            return
        if self._began is not None:
            self._gaps -= EVERY * self._num_held
            self._began, self._ended, self._num_held, self._steps = None, now, 0, 0
        self._gaps = min(self._gaps + num_decodes, MOST * EVERY)
        self._steps += num_decodes > 0
