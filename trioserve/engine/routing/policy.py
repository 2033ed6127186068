"""The choice of a worker for a request: pure functions of the workers' loads.

A route costs the predicted time to the first token, and the time that it takes from others:

- The prompts that wait or are being computed there come first, then what isn't cached of the
  request's own. Beside decodes, a step has as many of their tokens as
  :mod:`~trioserve.scheduler.prompt_share` gives them.
- Pages in the host's memory are copied, which takes a small part of the time to compute them.
- Pages that another worker would lend are fetched, if that is sooner.
- An adapter that the worker doesn't hold is loaded.
- Without a free slot, the request waits for a sequence to end.
- What is computed of the prompt delays those that come later. As many are taken to come as wait
  now. So overloaded workers keep prefixes together, and compute less.
- Each row that decodes makes the steps of all others longer.

The times are those of the worker's own model (:mod:`~trioserve.scheduler.step_time`), so a slower
worker gets less. They are computed for all workers at once, in columns.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

from trioserve.scheduler.prompt_share import rooms_beside
from trioserve.scheduler.step_time import StepTimeModel

HOST_COPY = 0.1
"""Time to copy a page from the host, by the time to compute it."""
OUTPUT_TOKENS = 64
"""Tokens of output for which the length of a step counts."""
_GUESS = StepTimeModel()
"""Times of steps where nothing is known of any worker."""
_GUESS.coefficients = [1e-2, 1e-4, 1e-4, 0.0]
_TINY = 1e-18
"""Seconds that are never missed, so that no time is 0."""
_NEVER = 1e18
"""Seconds of a step beside which there is always room: one without decodes."""

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@attrs.define(kw_only=True)
class WorkerLoad:
    """The load of a worker, as it matters for any request."""

    model: StepTimeModel
    """Times of its steps, as far as they are known."""
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


@attrs.define(eq=False)
class Loads:
    """The loads of workers in columns, [number of workers] each.

    A worker without steps so far is taken to be like the first one that has some.
    """

    itl_target: float | None = None
    """Target for the gap between two tokens, in seconds."""
    _columns: Floats = attrs.field(init=False, factory=lambda: np.zeros((12, 0)))
    _rows: list[Floats] = attrs.field(init=False, factory=list)
    _like: StepTimeModel | None = attrs.field(init=False, default=None)
    _unknown: dict[int, WorkerLoad] = attrs.field(init=False, factory=dict)
    """Loads of workers without steps."""

    def __len__(self) -> int:
        number: int = self._columns.shape[1]
        return number

    @classmethod
    def of(cls, loads: Sequence[WorkerLoad], itl_target: float | None = None) -> Loads:
        """Return the columns of ``loads``."""
        made = cls(itl_target)
        made._resize(len(loads))
        for index, load in enumerate(loads):
            made[index] = load
        return made

    def _resize(self, number: int) -> None:
        columns = np.zeros((len(self._columns), number))
        columns[:, : len(self)] = self._columns
        self._columns, self._rows = columns, list(columns)

    def __setitem__(self, index: int, load: WorkerLoad) -> None:
        """Set the load of a worker, which may be a new one."""
        if index >= len(self):
            self._resize(index + 1)
        if not load.model.is_known:
            self._unknown[index] = load
        else:
            self._unknown.pop(index, None)
            if self._like is None:
                self._like = load.model
                for each, other in self._unknown.items():
                    self._write(each, other)
        self._write(index, load)

    def assume(self, index: int, load: WorkerLoad, like: StepTimeModel) -> None:
        """Set the load of a worker, with the times of ``like`` in place of its own."""
        self._write(index, load, like)

    def _write(self, index: int, load: WorkerLoad, like: StepTimeModel | None = None) -> None:
        model = like or (load.model if load.model.is_known else self._like or _GUESS)
        fixed, row, token, read = model.coefficients
        decodes = load.num_decodes
        step = fixed + decodes * row + load.context * read
        ahead = load.num_ahead * step / decodes if decodes else 0.0
        streams = OUTPUT_TOKENS * (1 + decodes)
        self._columns[:, index] = (
            token + _TINY, read / 2, step, step + _TINY if decodes else _NEVER,
            model.seconds_of(load.prompt_tokens, 0), load.prompt_tokens, load.max_tokens,
            OUTPUT_TOKENS * (ahead + step) + streams * row, streams * read,
            1 + load.num_prompts, OUTPUT_TOKENS * ahead, decodes + load.num_ahead,
        )  # fmt: skip

    def num_sequences(self) -> Floats:
        """Return the sequences that run or wait."""
        return self._rows[-1]

    def costs(self, prompt: int, prefix: KnownPrefix) -> Floats:
        """Return the times to the first token, and what the request takes from others.

        Args:
            prompt: Number of tokens of the prompt.
            prefix: What the workers have for it.
        """
        return self.prompt_costs(prompt, prefix) + self.output_costs(prompt)

    def prompt_costs(
        self, prompt: int, prefix: KnownPrefix, held_up: Floats | None = None
    ) -> Floats:
        """Return the part of :meth:`costs` that is due to the prompt.

        It counts ``held_up`` sequences as delayed by what is computed of it, beside the prompts.
        """
        own, seconds = self._times(prompt, prefix)
        others = self._rows[9] if held_up is None else self._rows[9] + held_up
        return seconds + own * others

    def output_costs(self, prompt: int) -> Floats:
        """Return the part of :meth:`costs` that is due to the output behind a prompt."""
        always, context = self._rows[7:9]
        return prompt * context + always

    def ttfts(self, prompt: int, prefix: KnownPrefix) -> Floats:
        """Return the predicted seconds to the first token; arguments are those of :meth:`costs`."""
        return self._times(prompt, prefix)[1] + self._rows[10]

    def _times(self, prompt: int, prefix: KnownPrefix) -> tuple[Floats, Floats]:
        """Return the seconds for the prompt alone, and until it is computed, given a slot."""
        token, half_read, step, decode, waits, prompt_tokens, most = self._rows[:7]
        known = prefix.num_cached()
        seconds = waits.copy()
        if prefix.lent is not None:
            computing = prefix.lent * (token + half_read * (2 * known + prefix.lent))
            is_fetched = prefix.fetching < computing
            seconds += np.where(is_fetched, prefix.fetching, 0)
            known = known + np.where(is_fetched, prefix.lent, 0)
        own_tokens = prompt - known
        own = own_tokens * (token + half_read * (prompt + known))
        seconds += own
        if prefix.on_host is not None:
            ends = prefix.cached + prefix.num_cached()
            seconds += HOST_COPY * prefix.on_host * (token + half_read * ends)
        # A step has as much of prompts as the scheduler allows beside its decodes.
        beside = seconds / rooms_beside(decode, seconds / own, self.itl_target)
        steps = np.ceil(np.maximum(beside, (prompt_tokens + own_tokens) / most))
        seconds += steps * step
        if prefix.loading is not None:
            seconds += prefix.loading
        return own, seconds


@attrs.define(kw_only=True)
class KnownPrefix:
    """The parts of a prompt that workers have, [number of workers] each."""

    cached: Floats
    """Tokens of the prompt that each prefix cache has, or will have before the request's turn. The
    last token is never among them.
    """
    on_host: Floats | None = None
    """Tokens behind those whose pages are in the host's memory."""
    lent: Floats | None = None
    """Tokens behind those that another worker's prefix cache has and would lend."""
    fetching: Floats | float = 0.0
    """Seconds in which their pages are fetched from there."""
    handing_over: float = 0.0
    """Seconds in which the pages of the whole prompt are fetched."""
    loading: Floats | None = None
    """Seconds for its adapter to be loaded."""

    def num_cached(self) -> Floats:
        """Return the tokens of the prompt that needn't be computed."""
        return self.cached if self.on_host is None else self.cached + self.on_host


class Policy:
    """A choice among workers by one of :data:`~trioserve.config.worker_group.ROUTING_POLICIES`.

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

    def choose(
        self, loads: Loads, prompt: int, prefix: KnownPrefix, among: Bools | None = None
    ) -> int:
        """Return the index of the worker for a prompt of ``prompt`` tokens.

        ``among`` is true for workers that may be chosen; None stands for all.
        """
        costs = self._costs(loads, prompt, prefix, among)
        least = costs[costs.argmin()]
        if self._temperature > 0 and self._name != "round_robin":
            scale = self._temperature * max(abs(least), 1e-9)
            weights = np.exp((least - costs) / scale)
            return self._random.choices(range(len(loads)), weights.tolist())[0]
        # Equals take turns, so that an idle server uses all of its workers.
        best = (costs <= least).nonzero()[0]
        return int(best[next(self._turns) % len(best)])

    def foresee(
        self, loads: Loads, prompt: int, prefix: KnownPrefix, among: Bools | None = None
    ) -> int | None:
        """Return the worker that :meth:`choose` will return, once that has a part of the prompt.

        None says that this is open. Arguments are those of :meth:`choose`.
        """
        if self._temperature > 0 or self._name not in ("predicted", "prefix"):
            return None
        return int(self._costs(loads, prompt, prefix, among).argmin())

    def choose_apart(
        self, loads: Loads, prompt: int, prefix: KnownPrefix, among: Bools | None = None
    ) -> int | None:
        """Return the worker for a prompt whose output another one is to compute.

        None says that both cost least on one worker. The prompt counts for all streams there, whose
        next token it delays. Arguments are those of :meth:`choose`.
        """
        first = loads.prompt_costs(prompt, prefix, loads.num_sequences())
        second = loads.output_costs(prompt)
        if among is not None:
            first, second = np.where(among, first, np.inf), np.where(among, second, np.inf)
        one, other = int(first.argmin()), int(second.argmin())
        apart = first[one] + second[other] + prefix.handing_over
        return one if apart < (first + second).min() else None

    def _costs(self, loads: Loads, prompt: int, prefix: KnownPrefix, among: Bools | None) -> Floats:
        """Return the cost of each worker; infinity for those that may not be chosen."""
        costs = self._costs_of_all(loads, prompt, prefix)
        return costs if among is None else np.where(among, costs, np.inf)

    def _costs_of_all(self, loads: Loads, prompt: int, prefix: KnownPrefix) -> Floats:
        if self._name == "predicted":
            return loads.costs(prompt, prefix)
        if self._name == "round_robin":
            return np.zeros(len(loads))
        num_sequences = loads.num_sequences()
        if self._name == "least_loaded":
            return num_sequences
        return num_sequences / (1 << 20) - prefix.num_cached()
