"""Clusters drawn from a seed: several workers, their links, and workers that come and go."""

from __future__ import annotations

import random
from collections.abc import Callable

import attrs

from trioserve.config.worker_group import ROUTING_POLICIES
from trioserve.testing.simulation.scenario import Fault, Member, Pause, Scenario, WorkerChange

ONE_WORKER = 0.25
"""Share of the scenarios that stay as they are."""


def with_cluster(
    seed: int,
    scenario: Scenario,
    span: float,
    draw_faults: Callable[[random.Random], list[Fault]],
) -> Scenario:
    """Return most scenarios with several workers.

    Args:
        seed: The scenario's seed.
        scenario: The scenario of one worker; its faults become those of the first worker.
        span: Seconds over which clients arrive.
        draw_faults: Returns the faults of one worker.
    """
    rng = random.Random(f"cluster {seed}")
    if rng.random() < ONE_WORKER:
        return scenario
    count = rng.choice((2, 2, 3, 4))
    options = {
        **scenario.options,
        "data_parallel_size": count,
        "routing_policy": rng.choice(ROUTING_POLICIES),
        "routing_temperature": rng.choice((0.0, 0.0, 0.5)),
    }
    if scenario.worker.num_host_pages and options["enable_prefix_caching"]:
        options["kv_offloading_bytes"] = 1  # The workers lend each other pages.
        options["disaggregation"] = _roles(random.Random(f"roles {seed}"), count)
    faults: list[Fault] = []
    if not scenario.is_poisoned:
        others = [draw_faults(rng) for _ in range(1, count + 1)]
        faults = [
            attrs.evolve(fault, index=index)
            for index, own in enumerate([list(scenario.faults), *others])
            for fault in own + _link_faults(rng)
        ]
    return attrs.evolve(
        scenario,
        options=options,
        members=tuple(_member(rng) for _ in range(count)),
        faults=tuple(faults),
        changes=_changes(rng, count, span),
        pauses=tuple(_rolling(rng, pause) for pause in scenario.pauses),
    )


def _rolling(rng: random.Random, pause: Pause) -> Pause:
    """Swap weights on one worker after another in half of the swaps that retract."""
    if pause.mode != "swap retract" or rng.random() < 0.5:
        return pause
    return attrs.evolve(pause, mode="swap rolling")


def _roles(rng: random.Random, count: int) -> tuple[str, ...]:
    """Return roles with which prompts and outputs can be computed; none in a third of clusters."""
    chance = rng.random()
    if chance < 0.5:
        return () if chance < 0.35 else ("auto",)
    return ("prefill", *(rng.choice(("prefill", "decode")) for _ in range(2, count)), "decode")


def _member(rng: random.Random) -> Member:
    return Member(
        slowness=rng.choice((1.0, 1.0, 1.0, 3.0, 20.0)),
        link_delay=rng.choice((0.0, 0.0, 0.001, 0.05)),
        clock_rate=rng.choice((1.0, 1.0, 0.5, 3.0, 0.0)),
    )


def _link_faults(rng: random.Random) -> list[Fault]:
    """Return the faults of one worker's links."""
    return [
        Fault(
            worker=rng.choice((0, 0, 1)),
            what=rng.choice(("cut", "cut", "slow")),
            at=rng.uniform(0, 0.5),
            seconds=rng.choice((0.02, 0.5, 4.0, 100.0)),
        )
        for _ in range(rng.choice((0, 0, 0, 0, 1, 2)))
    ]


def _changes(rng: random.Random, count: int, span: float) -> tuple[WorkerChange, ...]:
    return tuple(
        WorkerChange(
            at=rng.uniform(0, span + 0.5),
            what=rng.choice(("add", "remove", "remove")),
            index=rng.randrange(count + 1),
        )
        for _ in range(rng.choice((0, 0, 1, 2, 3)))
    )
