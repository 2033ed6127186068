"""A fake model whose answers a test knows, and faults of its worker by chance."""

from __future__ import annotations

import random

import trio

from trioserve import Engine
from trioserve.protocol import wire
from trioserve.protocol.errors import EngineError
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


def step_time(plan: wire.Plan) -> float:
    """Return seconds that grow with the tokens, so that cached ones are worth something."""
    return 0.1 + 0.01 * int(wire.ints(plan.row_counts).sum())


async def keep_asking(
    engine: Engine, numbers: random.Random, *, num_prompts: int, most_tokens: int
) -> None:
    """Ask for random answers and check each; leave some, and empty the cache now and then."""
    for _ in range(15):
        tokens = prompt(numbers.randrange(num_prompts), numbers.randint(6, 30))
        count = numbers.randint(1, most_tokens)
        with trio.move_on_after(numbers.choice((0.2, 1000.0))):
            try:
                completion = await engine.complete(tokens, max_tokens=count)
            except EngineError:
                continue
            assert list(completion.token_ids) == answer_to(tokens, count)
        if numbers.random() < 0.03:
            engine.flush_cache()
