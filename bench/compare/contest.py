"""Servers side by side: each turn on every one of them, in rounds, until the time is up."""

from __future__ import annotations

import contextlib
import resource
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import psutil
import trio

from bench.compare.scenarios import InvalidRun, Scenario, Taken, check_agreement
from bench.report import markdown
from bench.servers import Running, Server, ServerFailed, running
from trioserve.load import Run
from trioserve.load.measure import MeasureError

OWN = "trioserve"
# The next round may take longer than the longest so far.
_MARGIN = 1.1
# A turn begins once this many cores or fewer have been busy for so many seconds, or after so many.
_CALM_CORES, _CALM_SECONDS, _CALM_PATIENCE = 0.1, 0.3, 10.0

_COLUMNS = {
    "tokens_per_second": ("tokens/s", "{:.1f}"),
    "ttft_p50_ms": ("TTFT p50 ms", "{:.0f}"),
    "ttft_p99_ms": ("TTFT p99 ms", "{:.0f}"),
    "itl_p50_ms": ("ITL p50 ms", "{:.1f}"),
    "itl_p99_ms": ("ITL p99 ms", "{:.1f}"),
    "tpot_p50_ms": ("TPOT p50 ms", "{:.1f}"),
    "burnt_cpu_seconds": ("CPU burnt s", "{:.2f}"),
    "seconds": ("until idle s", "{:.2f}"),
    "pss_mib": ("PSS MiB", "{:.0f}"),
    "pss_anonymous_mib": ("written MiB", "{:.0f}"),
    "pss_files_mib": ("of files MiB", "{:.0f}"),
    "pss_at_start_mib": ("PSS at its start MiB", "{:.0f}"),
    "pss_of_first_mib": ("of it the first process MiB", "{:.0f}"),
    "first_token_seconds": ("first token s", "{:.2f}"),
    "peak_resident_mib": ("peak, resident MiB", "{:.0f}"),
    "healthy_seconds": ("healthy s", "{:.2f}"),
    "server_cpu_seconds": ("server's CPU s", "{:.1f}"),
    "elsewhere_cores": ("cores busy elsewhere", "{:.2f}"),
}
"""A figure's title and form in a table; a table has those that its rows have."""


@attrs.frozen(kw_only=True)
class Row:
    """The figures of one server in one case of a scenario, in one round.

    ``elsewhere_cores`` are the cores that were busy with neither this server nor the client, on
    average: an otherwise idle machine shows less than 0.05.
    """

    scenario: str
    case: str
    server: str
    format: str
    round: int
    values: Mapping[str, float]
    run: Run | None = None
    """The client's records."""


def table(rows: Sequence[Row]) -> str:
    """Return one scenario's table: a line for each case and server, medians over the rounds.

    The last column is the first figure of this project's server in the same format by the line's.
    """
    names = [name for name in _COLUMNS if name in rows[0].values]
    cases = list(dict.fromkeys(row.case for row in rows))
    keys = list(dict.fromkeys((row.case, row.format, row.server) for row in rows))
    lines = []
    for case, format, server in sorted(keys, key=lambda key: cases.index(key[0])):
        same = [row for row in rows if (row.case, row.format, row.server) == (case, format, server)]
        medians = [(n, statistics.median(row.values[n] for row in same)) for n in names]
        found = ratios(rows, case, format, OWN, server, names[0])
        last = f"{statistics.median(found):.2f}" if found and server != OWN else ""
        cells = [_COLUMNS[name][1].format(figure) for name, figure in medians]
        lines.append([case, f"{server} {format}", len(same), *cells, last])
    titles = [_COLUMNS[name][0] for name in names]
    return markdown(["case", "server", "rounds", *titles, f"{titles[0]}: {OWN} / this"], lines)


def ratios(
    rows: Sequence[Row], case: str, format: str, server: str, other: str, name: str
) -> list[float]:
    """Return one server's figure by another's, for each round in which both were measured."""
    found: dict[str, dict[int, float]] = {server: {}, other: {}}
    for row in rows:
        if (row.case, row.format) == (case, format) and row.server in found:
            found[row.server][row.round] = row.values[name]
    ours, theirs = found[server], found[other]
    return [ours[round] / theirs[round] for round in ours if theirs.get(round)]


def busy_cases(rows: Sequence[Row]) -> dict[str, float]:
    """Return the cores that were busy with something else for each case: the most of any server.

    Servers and cases are apart because a disturbed one doesn't show among many that weren't.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for row in (each for each in rows if "elsewhere_cores" in each.values):
        name = ", ".join(filter(None, (row.scenario.replace("_", " "), row.case)))
        of = found.setdefault(name, {}).setdefault(row.server, [])
        of.append(row.values["elsewhere_cores"])
    return {name: round(max(map(statistics.median, of.values())), 4) for name, of in found.items()}


@attrs.define(eq=False)
class Notes:
    """The findings of a comparison so far, and its failures; a failure doesn't end it."""

    rows: list[Row] = attrs.field(factory=list)
    failures: list[str] = attrs.field(factory=list)
    servers: dict[str, dict[str, dict[str, Any]]] = attrs.field(factory=dict)
    """Versions and command line of each server, by scenario."""

    def know(self, server: Server, scenarios: Sequence[Scenario]) -> None:
        """Note how a server is started for ``scenarios``."""
        command = " ".join(server.argv(0)[1:]).replace(f"{Path(__file__).parents[2]}/", "")
        started = {**server.versions, "started_with": command}
        for scenario in scenarios:
            self.servers.setdefault(scenario.name, {})[server.title] = started

    @contextlib.contextmanager
    def failing(self, about: str) -> Iterator[None]:
        """Note and show a failure of the block, and go on after it."""
        try:
            yield
        except (ServerFailed, InvalidRun, MeasureError) as failure:
            self.failures.append(f"{about}: {failure}")
            print(f"FAILED: {self.failures[-1]}", flush=True)


async def contest(
    servers: Sequence[Server],
    scenarios: Sequence[Scenario],
    notes: Notes,
    rounds: int,
    deadline: float = float("inf"),
) -> None:
    """Measure ``scenarios`` on ``servers`` up to ``rounds`` times, at least once.

    No round begins that isn't likely to end before ``deadline``, a time of trio's clock. A server
    that doesn't start, or fails while it is warmed up, is left out and noted. Scenarios are all of
    them alone, or none.
    """
    async with contextlib.AsyncExitStack() as stack:
        up: list[Running | Server] = []
        for server in servers:
            notes.know(server, scenarios)
            if scenarios[0].alone:
                up.append(server)
                continue
            print(f"starting {server.title}", flush=True)
            with notes.failing(server.title):
                one = await stack.enter_async_context(running(server))
                for turn in [turn for scenario in scenarios for turn in scenario.warm_up()]:
                    await turn.measure(one)
                up.append(one)
        for round in _rounds(rounds if up else 0, deadline):
            for scenario in scenarios:
                await _one_round(up, scenario, round, notes)


async def _one_round(
    up: Sequence[Running | Server], scenario: Scenario, round: int, notes: Notes
) -> None:
    """Take each turn on every server; the round counts if their answers agree."""
    found: list[Row] = []
    answers: list[dict[str, Sequence[str]]] = []
    for turn in scenario.turns(round):
        answers.append({})
        for one in up if round % 2 == 0 else up[::-1]:
            server = _server_of(one)
            seconds = one.family.cpu_seconds if isinstance(one, Running) else _ended_seconds
            with notes.failing(server.title):
                taken, more = await _beside(partial(turn.measure, one), seconds)
                found.append(_row(scenario.name, turn.case, server, round, taken, more))
                answers[-1][server.title] = taken.answers
    with notes.failing(scenario.name):
        check_agreement(answers, _server_of(up[0]).title)
        notes.rows += found


def _server_of(one: Running | Server) -> Server:
    return one.server if isinstance(one, Running) else one


def _rounds(most: int, deadline: float) -> Iterator[int]:
    """Yield numbers from 0 while there is time for another round."""
    longest = 0.0
    for round in range(most):
        began = trio.current_time()
        if round and began + _MARGIN * longest > deadline:
            return
        yield round
        longest = max(longest, trio.current_time() - began)


def _row(
    scenario: str, case: str, server: Server, round: int, taken: Taken, more: Mapping[str, float]
) -> Row:
    """Return a row, and print its first figures."""
    shown = "  ".join(f"{name} {value:.4g}" for name, value in list(taken.values.items())[:4])
    where = f"{scenario} {case}".rstrip()
    print(f"round {round + 1}  {where:24} {server.title:18} {shown}", flush=True)
    values = {**taken.values, **more}
    of = {"server": server.name, "format": server.format, "run": taken.run}
    return Row(scenario=scenario, case=case, round=round, values=values, **of)


def busy_seconds() -> float:
    """Return the seconds that all cores together have computed since the machine started."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


async def _calm() -> None:
    """Wait until the server of the turn before is idle: some spin for a while."""
    with trio.move_on_after(_CALM_PATIENCE):
        while True:
            before = busy_seconds()
            await trio.sleep(_CALM_SECONDS)
            if busy_seconds() - before <= _CALM_CORES * _CALM_SECONDS:
                return
    print(f"not calm after {_CALM_PATIENCE:g} s: measuring all the same", flush=True)


async def _beside(
    measure: Callable[[], Awaitable[Taken]], server_seconds: Callable[[], float]
) -> tuple[Taken, dict[str, float]]:
    """Measure in calm; return also the server's CPU seconds, and the cores busy elsewhere."""
    await _calm()
    began = trio.current_time()
    everything, own, client = busy_seconds(), server_seconds(), time.process_time()
    taken = await measure()
    duration = trio.current_time() - began
    used = server_seconds() - own
    others = busy_seconds() - everything - used - (time.process_time() - client)
    elsewhere = max(others, 0.0) / duration
    return taken, {"server_cpu_seconds": used, "elsewhere_cores": elsewhere}


def _ended_seconds() -> float:
    """Return the CPU seconds of all servers that have ended, known only at their end."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
