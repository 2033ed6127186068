"""The time of a step, as a function of its rows, learned from the steps so far.

The time is a sum of four parts: a fixed one, one for each row that decodes, one for each token of a
prompt, and one for each token of context that attention reads. The four coefficients are fitted by
recursive least squares with forgetting (Ljung, *System Identification*, chapter 11), with these
changes:

- Errors count relative to a step's time, and no coefficient is negative.
- Steps with and without tokens of prompts are forgotten apart, so that the cost of
  prompts isn't lost in a long time without any.
- A step that takes far longer or shorter than expected counts as one at a limit, because the system
  may have stopped it. If most of the latest steps do so, the machine has another speed: then
  everything learned is scaled by their median.

The time of a step is its own. It doesn't contain the time for which its plan waited for the plan
before it.
"""

from __future__ import annotations

import math
import operator
import statistics
from collections import deque

import attrs

FORGETTING = 0.98
"""Weight of a step after one more of its kind: about the latest 50 steps count."""
LIMIT = 1.5
"""Ratio of a step's time to the expected one, or the inverse, past which a step is an outlier."""
NUM_LATEST = 7
"""Latest steps, of which most show another speed of the machine."""
NUM_KNOWN = 1
"""Steps with prompts, and as many with decodes, after which times are predicted."""
NUM_FITTED = 8
"""Steps of a kind after which the next ones are compared with what is expected."""
SWEEPS = 12
"""Passes over the coefficients after each step."""
INERTIA = 1e-4
"""Weight of a coefficient's last value beside all steps that determine it."""

FIXED, DECODES, TOKENS, CONTEXT = range(4)
_ORDER = (TOKENS, FIXED, DECODES, CONTEXT)
"""Order of the coefficients in a pass. If several values explain the first steps, prompts are taken
to cost as much as possible.
"""


@attrs.frozen(kw_only=True)
class StepLoad:
    """The work in a step."""

    decodes: int = 0
    """Rows of sequences that decode."""
    prompt_tokens: int = 0
    """All other tokens."""
    context: float = 0.0
    """Tokens of context that attention reads, summed over the tokens of the step."""


@attrs.define(eq=False)
class _Steps:
    """The sums over the steps of one kind: of products of features, and with the times."""

    products: list[list[float]] = attrs.field(factory=lambda: [[0.0] * 4 for _ in range(4)])
    times: list[float] = attrs.field(factory=lambda: [0.0] * 4)
    number: int = 0

    def add(self, features: tuple[float, ...], seconds: float) -> None:
        relative = [each / seconds for each in features]
        for row, one in zip(self.products, relative, strict=True):
            for column, other in enumerate(relative):
                row[column] = row[column] * FORGETTING + one * other
        self.times = [old * FORGETTING + one for old, one in zip(self.times, relative, strict=True)]
        self.number += 1

    def scale(self, ratio: float) -> None:
        """Multiply the times of all steps."""
        self.products = [[each / ratio**2 for each in row] for row in self.products]
        self.times = [each / ratio for each in self.times]


@attrs.define(eq=False)
class StepTimeModel:
    """The running model of the step's time, in seconds."""

    coefficients: list[float] = attrs.field(init=False, factory=lambda: [0.0] * 4)
    """Seconds for a step, a decode, a token of a prompt, and a token of context."""
    _kinds: dict[bool, _Steps] = attrs.field(
        init=False, factory=lambda: {False: _Steps(), True: _Steps()}
    )
    """Steps by whether they computed tokens of prompts."""
    _num_with_decodes: int = attrs.field(init=False, default=0)
    _latest: deque[float] = attrs.field(init=False, factory=lambda: deque(maxlen=NUM_LATEST))
    """Ratios of the latest steps' times to those expected."""

    @property
    def is_known(self) -> bool:
        """True if there were enough steps to predict others."""
        return min(self._num_with_decodes, self._kinds[True].number) >= NUM_KNOWN

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Learn from a step that took ``seconds``; a step without rows or time is ignored."""
        if seconds <= 0 or not (load.decodes or load.prompt_tokens):
            return
        kind = self._kinds[load.prompt_tokens > 0]
        expected = self.predict(load)
        if kind.number >= NUM_FITTED and expected > 0:
            self._latest.append(seconds / expected)
            ratio = statistics.median(self._latest)
            if len(self._latest) == NUM_LATEST and not 1 / LIMIT <= ratio <= LIMIT:
                self._scale(ratio)
                expected *= ratio
            seconds = min(max(seconds, expected / LIMIT), expected * LIMIT)
        kind.add((1.0, load.decodes, load.prompt_tokens, load.context), seconds)
        self._num_with_decodes += load.decodes > 0
        self._fit()

    def _scale(self, ratio: float) -> None:
        """Follow a change of the machine's speed."""
        self._latest.clear()
        self.coefficients = [each * ratio for each in self.coefficients]
        for kind in self._kinds.values():
            kind.scale(ratio)

    def _fit(self) -> None:
        """Minimize the sum of squares by coordinate descent, from the present coefficients."""
        without, with_prompts = self._kinds.values()
        products = [
            [one + other for one, other in zip(*rows, strict=True)]
            for rows in zip(without.products, with_prompts.products, strict=True)
        ]
        times = [one + other for one, other in zip(without.times, with_prompts.times, strict=True)]
        for at, row in enumerate(products):
            inertia = INERTIA * row[at]
            times[at] += inertia * self.coefficients[at]
            row[at] += inertia
        values = list(self.coefficients)
        order = [at for at in _ORDER if products[at][at] > 0]
        for _ in range(SWEEPS):
            for at in order:
                row = products[at]
                explained = sum(map(operator.mul, row, values))
                values[at] = max(values[at] + (times[at] - explained) / row[at], 0.0)
        self.coefficients = values

    def predict(self, load: StepLoad) -> float:
        """Return the seconds that a step is expected to take."""
        fixed, decode, token, context = self.coefficients
        work = load.decodes * decode + load.prompt_tokens * token + load.context * context
        return fixed + work

    def seconds_of(self, num_tokens: int, context: int) -> float:
        """Return the seconds for ``num_tokens`` of a prompt behind ``context`` tokens."""
        each = self.coefficients[TOKENS] + self.coefficients[CONTEXT] * (context + num_tokens / 2)
        return num_tokens * each

    def tokens_within(self, seconds: float, context: int) -> float:
        """Return the number of a prompt's tokens behind ``context`` that take ``seconds``."""
        square = self.coefficients[CONTEXT] / 2
        each = self.coefficients[TOKENS] + self.coefficients[CONTEXT] * context
        root = each + math.sqrt(each**2 + 4 * square * seconds)
        return 2 * seconds / root if root else math.inf
