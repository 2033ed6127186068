"""Times of steps: recorded on real machines (``tests/scheduler/step_times``), or very long."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from trioserve.scheduler.step_time import StepLoad, StepTimeModel


def recorded_steps(path: Path) -> Iterator[tuple[StepLoad, float]]:
    """Yield the load and the seconds of each step.

    A line of the file has its decodes, tokens of prompts, context and microseconds.
    """
    for line in path.read_text().splitlines():
        decodes, tokens, context, micros = json.loads(line)
        load = StepLoad(decodes=decodes, prompt_tokens=tokens, context=context)
        yield load, micros / 1e6


def learn_long_steps(model: StepTimeModel) -> None:
    """Have ``model`` learn that decodes and prompts take 9 seconds a step."""
    for _ in range(60):
        for load in (StepLoad(decodes=1), StepLoad(prompt_tokens=3)):
            model.observe(load, 9.0)
