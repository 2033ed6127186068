"""Runs of scenarios in virtual time, and their reports."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import trio

from trioserve.testing.simulation.scenario import Scenario
from trioserve.testing.simulation.trace import Trace, Violation, first_error
from trioserve.testing.simulation.world import World
from trioserve.testing.virtual import run_virtual

MAX_TASK_STEPS = 100_000
"""Steps of tasks after which a run counts as endless."""


@attrs.frozen(kw_only=True)
class Report:
    """The result of a run."""

    scenario: Scenario
    violation: Violation | None
    trace: Trace
    digest: str
    num_steps: int
    num_tokens: int
    num_checkpoints: int
    """Checkpoints of the client that leaves at one of them; 0 if there is none."""
    workers_lost: int
    outcomes: dict[str, int]
    """Number of clients by their ends."""

    def without_trace(self) -> Report:
        """Return the report without its trace, to save memory."""
        return attrs.evolve(self, trace=Trace())


def simulate(scenario: Scenario) -> Report:
    """Run ``scenario`` twice, and check that both runs are the same."""
    first, second = run_scenario(scenario), run_scenario(scenario)
    if first.digest == second.digest:
        return first
    pairs = zip(first.trace.lines, second.trace.lines, strict=False)
    where = next((f"{one!r} and {other!r}" for one, other in pairs if one != other), "the length")
    violation = Violation("the same seed gives the same run", where)
    return attrs.evolve(first, violation=first.violation or violation)


def run_scenario(scenario: Scenario) -> Report:
    """Run ``scenario`` once."""
    world = World(scenario)
    try:
        run_virtual(
            world.run,
            seed=scenario.seed,
            instruments=[_StepLimit(world.report)],
            on_idle=world.check_idle,
        )
    except BaseExceptionGroup as group:
        raise first_error(group) from group
    return Report(
        scenario=scenario,
        violation=world.violation,
        trace=world.trace,
        digest=world.trace.digest(),
        num_steps=world.checkers.num_steps,
        num_tokens=world.checkers.num_tokens,
        num_checkpoints=world.num_checkpoints,
        workers_lost=world.checkers.deaths,
        outcomes=dict(sorted(world.outcomes.items())),
    )


class _StepLimit(trio.abc.Instrument):
    """Instrument that counts the steps of all tasks, and ends an endless run."""

    def __init__(self, report: Callable[[Exception], None]) -> None:
        self._report = report
        self._count = 0

    def before_task_step(self, _: trio.lowlevel.Task) -> None:
        self._count += 1
        if self._count == MAX_TASK_STEPS:
            self._report(Violation("everything comes to an end", "steps without end"))
