"""The command ``python -m trioserve.testing.simulation``: runs many seeds, or repeats one."""

from __future__ import annotations

import argparse
import collections
import itertools
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence

import attrs

from trioserve.testing.simulation.draw import draw_scenario
from trioserve.testing.simulation.run import Report, simulate
from trioserve.testing.simulation.scenario import Scenario
from trioserve.testing.simulation.shrink import shrink

COMMAND = "python -m trioserve.testing.simulation"
PROGRESS_INTERVAL = 10.0


@attrs.define
class Totals:
    """Totals over a number of seeds."""

    num_seeds: int = 0
    num_requests: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    workers_lost: int = 0
    seconds: float = 0.0
    outcomes: collections.Counter[str] = attrs.field(factory=collections.Counter)
    faults: collections.Counter[str] = attrs.field(factory=collections.Counter)
    failed: list[int] = attrs.field(factory=list)
    """Seeds of scenarios that violated an invariant."""

    def add(self, report: Report) -> None:
        """Add a report."""
        self.num_seeds += 1
        self.num_requests += len(report.scenario.clients)
        self.num_steps += report.num_steps
        self.num_tokens += report.num_tokens
        self.workers_lost += report.workers_lost
        self.outcomes.update(report.outcomes)
        self.faults.update(fault.what for fault in report.scenario.faults)
        if report.violation is not None:
            self.failed.append(report.scenario.seed)

    def __str__(self) -> str:
        speed = self.num_requests / self.seconds if self.seconds else 0.0
        return (
            f"{self.num_seeds} seeds in {self.seconds:.1f} s: {self.num_requests} requests "
            f"({speed:.0f}/s), {self.num_steps} steps, {self.num_tokens} tokens, "
            f"{self.workers_lost} workers lost, {len(self.failed)} seeds failed"
        )


def run_seeds(seeds: Iterator[int], *, seconds: float, jobs: int = 1) -> Iterator[Report]:
    """Run seeds until the time is over, each twice, and yield their reports.

    Args:
        seeds: The seeds, without end or not.
        seconds: Time limit; seeds that have begun are finished.
        jobs: Number of processes.
    """
    deadline = time.monotonic() + seconds
    bounded = itertools.takewhile(lambda _: time.monotonic() < deadline, seeds)
    if jobs == 1:
        yield from map(_run_seed, bounded)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        # In batches, because a pool consumes an iterator at once.
        while batch := list(itertools.islice(bounded, 16 * jobs)):
            yield from pool.imap_unordered(_run_seed, batch)


def _run_seed(seed: int) -> Report:
    report = simulate(draw_scenario(seed))
    # The trace is large and isn't needed any more; reports are sent between processes.
    return report if report.violation is not None else report.without_trace()


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit status, 1 if an invariant didn't hold."""
    options = _parser().parse_args(arguments)
    if options.seed is not None:
        return _replay(options)
    totals = Totals()
    started = shown = time.monotonic()
    seeds: Iterator[int] = itertools.count(options.first)
    if options.count is not None:
        seeds = iter(range(options.first, options.first + options.count))
    seconds = options.seconds or (float("inf") if options.count is not None else 60.0)
    for report in run_seeds(seeds, seconds=seconds, jobs=options.jobs):
        totals.add(report)
        totals.seconds = time.monotonic() - started
        if options.digests:
            print(report.scenario.seed, report.digest)
        if report.violation is not None:
            print(_describe(shrink(report)), flush=True)
            if len(totals.failed) >= options.most_failures:
                break
        if time.monotonic() - shown > PROGRESS_INTERVAL:
            shown = time.monotonic()
            print(totals, file=sys.stderr, flush=True)
    print(totals, file=sys.stderr)
    for name, counts in (("ends", totals.outcomes), ("faults", totals.faults)):
        listed = ", ".join(f"{count} {what}" for what, count in counts.most_common())
        print(f"{name}: {listed}", file=sys.stderr)
    return 1 if totals.failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--seconds", type=float, help="time limit in seconds (default: 60)")
    parser.add_argument("--count", type=int, help="most seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    parser.add_argument(
        "--most-failures", type=int, default=3, help="stop after this many failures (default: 3)"
    )
    parser.add_argument("--digests", action="store_true", help="print each seed's trace hash")
    parser.add_argument("--seed", type=int, help="run only this seed")
    parser.add_argument(
        "--clients", type=_numbers, help="run the seed with only these clients, as in 0,3"
    )
    parser.add_argument("--faults", type=_numbers, help="run the seed with only these faults")
    parser.add_argument("--pauses", type=_numbers, help="run the seed with only these pauses")
    parser.add_argument(
        "--adapters",
        type=_numbers,
        help="run the seed with only these loads and unloads of adapters",
    )
    parser.add_argument(
        "--changes", type=_numbers, help="run the seed with only these changes of workers"
    )
    parser.add_argument("--trace", action="store_true", help="print the scenario and all events")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


def _replay(options: argparse.Namespace) -> int:
    scenario = draw_scenario(options.seed).only(
        options.clients, options.faults, options.pauses, options.adapters, options.changes
    )
    report = simulate(scenario)
    if options.trace:
        print("\n".join([*_listing(scenario), *report.trace.lines]))
    print(f"seed {options.seed}: trace {report.digest}, {report.violation or 'fine'}")
    return 1 if report.violation is not None else 0


def _listing(scenario: Scenario) -> list[str]:
    events = (
        *(*scenario.clients, *scenario.faults, *scenario.pauses),
        *(*scenario.adapters, *scenario.changes),
    )
    parts = [scenario.options, scenario.worker, *scenario.members, *events]
    return [*map(str, parts), f"ends: {scenario.ends} at {scenario.ends_at:.3f}"]


def _describe(report: Report) -> str:
    """Return the violation, the last events, and the command that repeats it."""
    scenario = report.scenario
    whole = draw_scenario(scenario.seed)
    clients = ",".join(str(client.number) for client in scenario.clients)
    faults = ",".join(str(whole.faults.index(fault)) for fault in scenario.faults)
    pauses = ",".join(str(whole.pauses.index(pause)) for pause in scenario.pauses)
    adapters = ",".join(str(whole.adapters.index(change)) for change in scenario.adapters)
    changes = ",".join(str(whole.changes.index(change)) for change in scenario.changes)
    return "\n".join(
        [
            f"seed {scenario.seed}: {report.violation}",
            *(f"    {line}" for line in report.trace.lines[-12:]),
            f"again: {COMMAND} --seed {scenario.seed} --clients {clients} --faults {faults or ','} "
            f"--pauses {pauses or ','} --adapters {adapters or ','} "
            + (f"--changes {changes or ','} " if whole.changes else "")
            + "--trace",
        ]
    )


def run() -> None:
    """Run the command line."""
    sys.exit(main(sys.argv[1:]))
