"""Workers that draft tokens or have stages, or both, drawn from a seed."""

from __future__ import annotations

import random
from typing import Any

import attrs

from trioserve.testing.simulation.scenario import WorkerKind

FIRST_RAGGED = 1000
"""From this seed on, the workers of half of the scenarios draft tokens."""
FIRST_STAGES = 4000
"""From this seed on, half of the workers have stages."""


def with_drafts(worker: WorkerKind, seed: int) -> WorkerKind:
    """Return ``worker``, with drafts or without."""
    rng = random.Random(f"drafts {seed}")
    if seed < FIRST_RAGGED or rng.random() < 0.5:
        return worker
    return attrs.evolve(worker, max_row_tokens=rng.choice((2, 3, 5, 8)))


def with_stages(worker: WorkerKind, options: dict[str, Any], seed: int) -> WorkerKind:
    """Return ``worker``, with stages or without; they allow more plans in flight."""
    rng = random.Random(f"stages {seed}")
    if seed < FIRST_STAGES or rng.random() < 0.5:
        return worker
    num_stages = rng.choice((2, 2, 3, 4))
    options["max_plans_in_flight"] = num_stages + 1
    return attrs.evolve(worker, num_stages=num_stages)
