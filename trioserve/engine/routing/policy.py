"""The choice of a worker for a request: pure functions of the workers' loads.

A route costs the predicted time to the first token, and the time that it takes from others:

- The prompts that wait or are being computed there come first, then what isn't cached of the
  request's own. Beside decodes, a step has as many of their tokens as
  :mod:`~trioserve.scheduler.prompt_share` gives them.
- Pages in the host's memory are copied, which takes a small part of the time to compute them.
- Without a free slot, the request waits for a sequence to end.
- What is computed of the prompt delays those that come later.
- Each row that decodes makes the steps of all others longer.

The times are those of the worker's own model (:mod:`~trioserve.scheduler.step_time`), so a slower
worker gets less.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import attrs

from trioserve.scheduler.prompt_share import longest_step
from trioserve.scheduler.step_time import StepTimeModel

HOST_COPY = 0.1
"""Time to copy a page from the host, by the time to compute it."""
OUTPUT_TOKENS = 64
"""Tokens of output for which the length of a step counts."""
_GUESS = StepTimeModel()
"""Times of steps where nothing is known of any worker."""
_GUESS.coefficients = [1e-2, 1e-4, 1e-4, 0.0]


@attrs.frozen(kw_only=True)
class WorkerLoad:
    """The load of a worker, as far as it matters for one request."""

    model: StepTimeModel
    """Times of its steps, as far as they are known."""
    cached: int = 0
    """Tokens of the prompt that its prefix cache has, or will have before the request's turn."""
    cached_on_host: int = 0
    """Tokens of the prompt behind those whose pages are in the host's memory."""
    prompt_tokens: int = 0
    """Tokens of other prompts that it has to compute first."""
    num_prompts: int = 0
    """Number of those prompts."""
    num_decodes: int = 0
    """Sequences that decode."""
    context: int = 0
    """Tokens of context that a step of those reads."""
    num_ahead: int = 0
    """Sequences that need a slot before the request gets one; 0 if one is free."""
    max_tokens: int = 1 << 30
    """Most tokens of a step."""
    itl_target: float | None = None
    """Target for the gap between two tokens, in seconds."""

    @property
    def num_cached(self) -> int:
        """Tokens of the prompt that needn't be computed."""
        return self.cached + self.cached_on_host

    @property
    def num_sequences(self) -> int:
        """Sequences that run or wait."""
        return self.num_decodes + self.num_ahead


def predicted_ttft(load: WorkerLoad, prompt: int) -> float:
    """Return the seconds until the first token of a prompt of ``prompt`` tokens."""
    return _Prediction(load, prompt).ttft()


def predicted_cost(load: WorkerLoad, prompt: int) -> float:
    """Return the time to the first token, and what the request takes from others.

    Its prompt delays those that come later; as many are taken to come as wait now. So overloaded
    workers keep prefixes together, and compute less. Longer steps delay all streams.
    """
    found = _Prediction(load, prompt)
    return found.ttft() + found.own * (1 + load.num_prompts) + OUTPUT_TOKENS * found.longer()


class _Prediction:
    """The times of a prompt on a worker, in seconds."""

    def __init__(self, load: WorkerLoad, prompt: int) -> None:
        self._load, self._prompt = load, prompt
        self._fixed, self._row, _, self._read = load.model.coefficients
        self._own_tokens = max(prompt - load.num_cached, 1)
        self.own = load.model.seconds_of(self._own_tokens, load.num_cached)
        """The time to compute what isn't cached of the prompt."""
        self._decode = self._fixed + load.num_decodes * self._row + load.context * self._read
        """The time of a step without prompts."""

    def ttft(self) -> float:
        """Return the time until the first token."""
        load = self._load
        waits = load.model.seconds_of(load.prompt_tokens, 0)
        if load.cached_on_host:
            waits += HOST_COPY * load.model.seconds_of(load.cached_on_host, load.cached)
        seconds = waits + self.own
        steps = math.ceil((load.prompt_tokens + self._own_tokens) / load.max_tokens)
        if load.num_decodes and seconds > 0:
            # A step has as much of prompts as the scheduler allows beside its decodes.
            stretch = seconds / self.own if self.own else 1.0
            room = longest_step(self._decode, stretch, load.itl_target) - self._decode
            if room > 0:
                steps = max(steps, math.ceil(seconds / room))
        seconds += steps * (self._decode if load.num_decodes else self._fixed)
        if load.num_ahead and load.num_decodes:
            seconds += load.num_ahead * OUTPUT_TOKENS * self._decode / load.num_decodes
        return seconds

    def longer(self) -> float:
        """Return the time by which a step delays the request and all other streams."""
        more = self._row + self._prompt * self._read
        return self._decode + more + self._load.num_decodes * more


class Policy:
    """A choice among workers by one of :data:`~trioserve.config.engine.ROUTING_POLICIES`.

    Args:
        name: ``predicted`` takes the least cost, ``least_loaded`` the fewest sequences, ``prefix``
            the longest cached prefix, ``round_robin`` the next worker.
        temperature: With more than 0, a worker is drawn with a probability that falls with its cost
            by that many times the least cost.
        seed: Of those draws.
    """

    def __init__(self, name: str = "predicted", temperature: float = 0.0, seed: int = 0) -> None:
        self._name = name
        self._temperature = temperature
        self._random = random.Random(seed)
        self._turns = itertools.count()

    def choose(self, loads: Sequence[WorkerLoad], prompt: int) -> int:
        """Return the index of the worker for a prompt of ``prompt`` tokens."""
        if self._name == "round_robin":
            return next(self._turns) % len(loads)
        # A worker without steps so far is taken to be like the others.
        like = next((each.model for each in loads if each.model.is_known), _GUESS)
        known = [each if each.model.is_known else attrs.evolve(each, model=like) for each in loads]
        costs = [self._cost(load, prompt) for load in known]
        least = min(costs)
        if self._temperature > 0:
            scale = self._temperature * max(abs(least), 1e-9)
            weights = [math.exp((least - cost) / scale) for cost in costs]
            return self._random.choices(range(len(loads)), weights)[0]
        # Equals take turns, so that an idle server uses all of its workers.
        best = [index for index, cost in enumerate(costs) if cost <= least]
        return best[next(self._turns) % len(best)]

    def _cost(self, load: WorkerLoad, prompt: int) -> float:
        if self._name == "least_loaded":
            return load.num_sequences
        if self._name == "prefix":
            return -load.num_cached + load.num_sequences / (1 << 20)
        return predicted_cost(load, prompt)
