"""The cost of a route for one worker alone, step by step: the reference for the columns."""

from __future__ import annotations

import math

import attrs

from trioserve.engine.routing.policy import HOST_COPY, OUTPUT_TOKENS, WorkerLoad
from trioserve.scheduler.prompt_share import longest_step


@attrs.frozen(kw_only=True)
class Given:
    """A worker's load, and what it has for the request."""

    load: WorkerLoad
    cached: int = 0
    on_host: int = 0
    loading: float = 0.0


def predicted_ttft(given: Given, prompt: int, itl_target: float | None = None) -> float:
    """Return the seconds until the first token of a prompt of ``prompt`` tokens."""
    load = given.load
    seconds_of = load.model.seconds_of
    known = given.cached + given.on_host
    own = seconds_of(prompt - known, known)
    waits = seconds_of(load.prompt_tokens, 0) + HOST_COPY * seconds_of(given.on_host, given.cached)
    seconds = waits + own
    step = _decode_step(load)
    steps = math.ceil((load.prompt_tokens + prompt - known) / load.max_tokens)
    if load.num_decodes and seconds > 0:
        room = longest_step(step, seconds / own if own else 1.0, itl_target) - step
        if room > 0:
            steps = max(steps, math.ceil(seconds / room))
    seconds += steps * step + given.loading
    if load.num_ahead and load.num_decodes:
        seconds += load.num_ahead * OUTPUT_TOKENS * step / load.num_decodes
    return seconds


def predicted_cost(given: Given, prompt: int, itl_target: float | None = None) -> float:
    """Return the time to the first token, and what the request takes from others."""
    load = given.load
    known = given.cached + given.on_host
    own = load.model.seconds_of(prompt - known, known)
    _, row, _, read = load.model.coefficients
    more = row + prompt * read
    longer = _decode_step(load) + more + load.num_decodes * more
    ttft = predicted_ttft(given, prompt, itl_target)
    return ttft + own * (1 + load.num_prompts) + OUTPUT_TOKENS * longer


def _decode_step(load: WorkerLoad) -> float:
    """Return the time of a step without prompts."""
    fixed, row, _, read = load.model.coefficients
    return fixed + load.num_decodes * row + load.context * read
