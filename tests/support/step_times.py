"""Steps that were recorded on real machines: ``tests/scheduler/step_times``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from trioserve.scheduler.step_time import StepLoad


def recorded_steps(path: Path) -> Iterator[tuple[StepLoad, float]]:
    """Yield the load and the seconds of each step.

    A line of the file has its decodes, tokens of prompts, context and microseconds.
    """
    for line in path.read_text().splitlines():
        decodes, tokens, context, micros = json.loads(line)
        load = StepLoad(decodes=decodes, prompt_tokens=tokens, context=context)
        yield load, micros / 1e6
