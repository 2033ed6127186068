"""A fake model whose answers a test knows, and faults of its worker by chance."""

from __future__ import annotations

import random

from trioserve.protocol import wire
from trioserve.testing import StepFails, WorkerDies
from trioserve.testing.fake_faults import Script


def prompt(number: int, length: int = 22) -> list[int]:
    """Return a prompt that shares no beginning with those of other numbers."""
    return [100 + number, *range(1, length)]


def next_token(context: list[int], _: object = None) -> int:
    """Return the token that follows ``context``."""
    return (31 * sum(context) + len(context)) % 256


def answer_to(tokens: list[int], count: int) -> list[int]:
    """Return what a worker says, whatever it has cached."""
    known = list(tokens)
    for _ in range(count):
        known.append(next_token(known))
    return known[len(tokens) :]


def faults_by_chance(numbers: random.Random) -> Script:
    """Return a script by which steps fail and workers die now and then."""

    def script(_: int, plan: wire.Plan) -> None:
        if numbers.random() < 0.02:
            raise WorkerDies
        if numbers.random() < 0.02:
            raise StepFails("by chance")

    return script
