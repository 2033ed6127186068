"""The share of a step that prompts get beside decodes, and their order.

Every token of a prompt that a step computes delays the next token of all streams. The share follows
from what a step costs (:mod:`~trioserve.scheduler.step_time`):

- A step without prompts takes ``d`` seconds. With prompts it may take ``d * (1 + s ** (2 / 3))``,
  where ``s`` is the stretch of the prompt that is delayed most: the time from its arrival to its
  end, if prompts had the machine to themselves, by the time that it would take alone. If a step
  takes ``d * y``, streams are stretched by ``y``, and this prompt by ``s * y / (y - 1)``. The sum
  of the squares of both is smallest for this ``y``. So a single prompt doubles the gap between two
  tokens, and a burst of 8 equal prompts makes it five times as long.
- A given target takes the place of this bound. Once the stretch exceeds :data:`PATIENCE`, the
  bound grows in proportion, so that prompts don't starve.
- Without decodes, a step has so many tokens that its fixed cost is a small part of it, and products
  have their full rate. More would only make a new request wait longer for the next step.

Prompts are computed in the order of the time that they have waited by the time that they still
take: highest response ratio next (Brinch Hansen, 1971), with preemption at each step. Of two
prompts that came together, the shorter is first. A long one comes first once it has waited long.

These are pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

from trioserve.scheduler.step_time import FIXED, StepTimeModel

Floats = npt.NDArray[np.float64]
PATIENCE = 10.0
"""Stretch of a prompt from which a given target grows."""
OVERHEAD = 0.05
"""Part of a step without decodes that its fixed cost may be, if the tokens' limit allows it."""
FULL_RATE = 256
"""Tokens with which a step's products have their full rate. The fixed cost doesn't show it: reading
the weights is hidden behind the arithmetic of many tokens, and determines the time of few.
"""
SHORT = 0.25
"""Seconds that a step without decodes may take for the sake of that rate."""
_GUESS = 1e-3
"""Seconds for a token, if nothing is known."""


@attrs.frozen(kw_only=True)
class PromptWork:
    """A prompt that is being computed, or could be."""

    remaining: int
    """Tokens to be computed."""
    context: int = 0
    """Tokens that have KV."""
    skipped: int = 0
    """Tokens of ``context`` that came from the prefix cache."""
    waited: float = 0.0
    """Seconds since its arrival."""

    def seconds(self, model: StepTimeModel) -> float:
        """Return the time for its remaining tokens; it is positive."""
        return model.seconds_of(self.remaining, self.context) or self.remaining * _GUESS

    def seconds_alone(self, model: StepTimeModel) -> float:
        """Return the time for all tokens that the prefix cache didn't have."""
        tokens = self.remaining + self.context - self.skipped
        return model.seconds_of(tokens, self.skipped) or tokens * _GUESS


def response_ratio(model: StepTimeModel, prompt: PromptWork) -> float:
    """Return the time that ``prompt`` has waited by the time that it still takes."""
    return prompt.waited / prompt.seconds(model)


def stretch_of(model: StepTimeModel, prompts: Sequence[PromptWork]) -> float:
    """Return the largest stretch of ``prompts``.

    The shorter of two is taken to be first, because it soon will be: a prompt that has just come
    has the lowest ratio, whatever its length.
    """
    ahead, largest = 0.0, 1.0
    each_seconds = ((prompt.seconds(model), prompt) for prompt in prompts)
    for seconds, prompt in sorted(each_seconds, key=lambda pair: pair[0]):
        ahead += seconds
        largest = max(largest, (prompt.waited + ahead) / prompt.seconds_alone(model))
    return largest


def longest_step(decode: float, stretch: float, target: float | None) -> float:
    """Return the most seconds that a step with prompts may take.

    Args:
        decode: Seconds of the step without prompts.
        stretch: Result of :func:`stretch_of`.
        target: Target for the gap between two tokens in seconds; None derives it from ``decode``.
    """
    if target is None:
        return decode * (1 + math.pow(stretch, 2 / 3))
    return max(target, max(target, decode) * stretch / PATIENCE)


def rooms_beside(decodes: Floats, stretches: Floats, target: float | None) -> Floats:
    """Return the seconds for prompts in the longest step of each worker, as :func:`longest_step`.

    They are infinite where ``target`` leaves none.
    """
    if target is None:
        return decodes * np.power(stretches, 2 / 3)
    longest = np.maximum(target, np.maximum(target, decodes) * stretches / PATIENCE)
    rooms = longest - decodes
    return np.where(rooms > 0, rooms, np.inf)


def tokens_beside(
    model: StepTimeModel, prompts: Sequence[PromptWork], decode: float, target: float | None
) -> int:
    """Return the number of tokens of ``prompts`` in a step whose decodes take ``decode`` seconds.

    It is at least 1, so that a step always makes progress with a prompt.
    """
    left = longest_step(decode, stretch_of(model, prompts), target) - decode
    count = 0
    for prompt in prompts:
        seconds = prompt.seconds(model)
        if seconds > left:
            within = model.tokens_within(max(left, 0.0), prompt.context)
            return max(count + int(min(within, prompt.remaining)), 1)
        left -= seconds
        count += prompt.remaining
    return max(count, 1)


def tokens_alone(model: StepTimeModel, prompts: Sequence[PromptWork]) -> float:
    """Return the number of tokens of ``prompts`` in a step without decodes."""
    seconds = model.coefficients[FIXED] * (1 / OVERHEAD - 1)
    if not model.is_known or not seconds or not prompts:
        return math.inf
    context = prompts[0].context
    least = min(model.tokens_within(SHORT, context), FULL_RATE)
    return max(model.tokens_within(seconds, context), least, 1.0)
