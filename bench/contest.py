"""Servers side by side: each turn on every one of them, in rounds, until the time is up."""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import attrs
import trio

from bench.family import busy_seconds
from bench.rows import Row
from bench.scenario import Lonely, Scenario, Taken, Turn
from bench.servers import Running, Server, ServerFailed, running
from bench.validity import InvalidRun, check_agreement
from trioserve.load import Run

__all__ = ["Notes", "contest", "one_by_one", "show"]

# The next round may take longer than the longest so far.
_MARGIN = 1.1
# A turn begins once this many cores or fewer have been busy for so many seconds, or after so many.
_CALM_CORES, _CALM_SECONDS, _CALM_PATIENCE = 0.1, 0.3, 10.0


@attrs.define(eq=False)
class Notes:
    """What a comparison has found so far, and what went wrong; a failure doesn't end it."""

    rows: list[Row] = attrs.field(factory=list)
    runs: list[tuple[Row, Run]] = attrs.field(factory=list)
    """What the client saw, of those rows that come from a run."""
    failures: list[str] = attrs.field(factory=list)
    versions: dict[str, dict[str, str | dict[str, str]]] = attrs.field(factory=dict)
    """Of each server, and under ``started_with`` its options in which scenarios."""

    def fail(self, failure: Exception) -> None:
        """Note and show a failure."""
        self.failures.append(str(failure))
        print(f"FAILED: {failure}", flush=True)

    def note(self, row: Row, run: Run | None = None) -> None:
        """Note a row."""
        self.rows.append(row)
        if run is not None:
            self.runs.append((row, run))

    def know(self, server: Server, scenarios: Sequence[Scenario | Lonely]) -> None:
        """Note how a server is started for ``scenarios``."""
        known = self.versions.setdefault(server.title, {**server.versions, "started_with": {}})
        starts = known["started_with"]
        assert isinstance(starts, dict)
        starts[", ".join(each.name for each in scenarios)] = " ".join(server.argv(0)[1:])


def show(row: Row) -> None:
    """Print the first figures of a row, for somebody who watches."""
    shown = "  ".join(f"{name} {value:.4g}" for name, value in list(row.values.items())[:4])
    case = f"{row.scenario} {row.case}".rstrip()
    print(f"round {row.round + 1}  {case:24} {row.title:18} {shown}", flush=True)


async def contest(
    servers: Sequence[Server],
    scenarios: Sequence[Scenario],
    notes: Notes,
    *,
    rounds: int,
    deadline: float = float("inf"),
) -> None:
    """Measure ``scenarios`` on ``servers`` up to ``rounds`` times, at least once.

    No round begins that isn't likely to end before ``deadline``, a time of trio's clock. A server
    that doesn't start, or fails while it is warmed up, is left out and noted.
    """
    async with AsyncExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        up: list[Running] = []
        for server in servers:
            print(f"starting {server.title}", flush=True)
            notes.know(server, scenarios)
            try:
                one = await stack.enter_async_context(running(server, logs / server.name))
                for scenario in scenarios:
                    for turn in scenario.warm_up():
                        await turn.measure(one)
            except (ServerFailed, InvalidRun) as failure:
                notes.fail(failure)
            else:
                up.append(one)
        for round in _rounds(rounds if up else 0, deadline):
            for scenario in scenarios:
                await _one_round(up, scenario, round, notes)


async def one_by_one(
    servers: Sequence[Server],
    scenario: Lonely,
    notes: Notes,
    *,
    rounds: int,
    deadline: float = float("inf"),
) -> None:
    """As :func:`contest`, but each server is started anew in each round, and is up alone."""
    for server in servers:
        notes.know(server, [scenario])
    for round in _rounds(rounds, deadline):
        for server in servers if round % 2 == 0 else servers[::-1]:
            await _calm()
            with tempfile.TemporaryDirectory() as folder:
                measure = partial(scenario.measure, server, Path(folder) / "log", round)
                try:
                    taken, elsewhere, _ = await _beside(measure, _ended_seconds)
                except (ServerFailed, InvalidRun) as failure:
                    notes.fail(failure)
                    continue
            values = {**taken.values, "elsewhere_cores": elsewhere}
            row = _row(scenario.name, "", server, round, values)
            show(row)
            notes.note(row, taken.run)


def _rounds(most: int, deadline: float) -> Iterator[int]:
    """Numbers from 0 while there is time for another round."""
    longest = 0.0
    for round in range(most):
        began = trio.current_time()
        if round and began + _MARGIN * longest > deadline:
            return
        yield round
        longest = max(longest, trio.current_time() - began)


async def _one_round(up: Sequence[Running], scenario: Scenario, round: int, notes: Notes) -> None:
    """Each turn on every server; who goes first changes. Counts if their answers agree."""
    rows: list[tuple[Row, Run | None]] = []
    answers: list[dict[str, Sequence[str]]] = []
    for turn in scenario.turns(round):
        answers.append({})
        for one in up if round % 2 == 0 else up[::-1]:
            await _calm()
            try:
                taken, elsewhere, used = await _watched(one, turn)
            except InvalidRun as failure:
                notes.fail(failure)
                continue
            values = {**taken.values, "server_cpu_seconds": used, "elsewhere_cores": elsewhere}
            row = _row(scenario.name, turn.case, one.server, round, values)
            rows.append((row, taken.run))
            answers[-1][one.server.title] = taken.answers
            show(row)
    try:
        check_agreement(answers, up[0].server.title)
    except InvalidRun as failure:
        notes.fail(failure)
    else:
        for row, run in rows:
            notes.note(row, run)


async def _calm() -> None:
    """Wait until the server of the turn before does nothing any more: some spin for a while."""
    with trio.move_on_after(_CALM_PATIENCE):
        while True:
            before = busy_seconds()
            await trio.sleep(_CALM_SECONDS)
            if busy_seconds() - before <= _CALM_CORES * _CALM_SECONDS:
                return
    print(f"not calm after {_CALM_PATIENCE:g} s: measuring all the same", flush=True)


async def _watched(one: Running, turn: Turn) -> tuple[Taken, float, float]:
    """What the turn took; the cores that neither server nor client used; the server's seconds."""
    return await _beside(partial(turn.measure, one), one.family.cpu_seconds)


async def _beside(
    measure: Callable[[], Awaitable[Taken]], server_seconds: Callable[[], float]
) -> tuple[Taken, float, float]:
    """As :func:`_watched`; ``server_seconds`` is what the server has computed so far."""
    began = trio.current_time()
    everybody, own, client = busy_seconds(), server_seconds(), time.process_time()
    taken = await measure()
    duration = trio.current_time() - began
    used = server_seconds() - own
    others = busy_seconds() - everybody - used - (time.process_time() - client)
    return taken, max(others, 0.0) / duration, used


def _ended_seconds() -> float:
    """Seconds of CPU that all servers have used that have ended, and their processes with them.

    Where a server is started for its turn, that is known only once it has ended.
    """
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _row(scenario: str, case: str, server: Server, round: int, values: Mapping[str, float]) -> Row:
    return Row(
        scenario=scenario,
        case=case,
        server=server.name,
        format=server.format,
        round=round,
        values=values,
    )
