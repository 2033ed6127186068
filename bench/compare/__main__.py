"""This server beside others, on one machine in one run.

``python -m bench.compare --compare llama.cpp --compare vllm --minutes 20`` measures everything as
often as fits into the time, and at least once. It prints a table for each scenario and the targets
beside what was reached; ``--save`` writes each table to a file. Exit code 1: something failed, or a
run wasn't valid.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import attrs
import trio

from bench.compare.contest import Notes, Row, busy_cases, contest, table
from bench.compare.decoding import Beams, Speculation, known_tasks
from bench.compare.scenarios import (
    PROMPTS,
    SHARED_PREFIX,
    THROUGHPUT,
    Burst,
    CpuAfterLeave,
    Loads,
    Memory,
    Scenario,
    Setting,
    Start,
    options_of,
)
from bench.compare.targets import judge
from bench.peers.model_files import FORMATS
from bench.peers.servers import BF16_ONLY, MAKERS, SERVERS
from bench.performance_page import QUIET
from bench.report import add_save, asked, save, verdict_table
from bench.servers import Server
from trioserve.cli.usage import UsageError

_TOGETHER = ("throughput", "prompts", "burst", "shared_prefix", "cpu_after_leave")
SCENARIOS = (*_TOGETHER, "memory", "start")
DECODING = ("beam_search", "speculation")
"""Scenarios that are measured only if they are named."""
_ROUNDS, _MOST_ROUNDS = 3, 9


@attrs.frozen(kw_only=True)
class Part:
    """Servers that are measured side by side; ``share`` weighs its part of the time.

    ``run`` takes the notes, the most rounds and a deadline.
    """

    title: str
    share: float
    run: Callable[[Notes, int, float], Awaitable[None]]


async def measure(parts: Sequence[Part], notes: Notes, rounds: int, minutes: float | None) -> None:
    """Run each part; the rest of a part's time goes to those after it."""
    end = trio.current_time() + (minutes * 60 if minutes is not None else float("inf"))
    for number, part in enumerate(parts):
        now = trio.current_time()
        left = sum(other.share for other in parts[number:])
        print(f"\n{part.title}", flush=True)
        await part.run(notes, rounds, now + (end - now) * part.share / left)


def parts_of(
    chosen: Sequence[str],
    formats: Sequence[str],
    peers: Sequence[str],
    widths: Loads,
    make: Mapping[str, Callable[[Setting], Server]],
) -> list[Part]:
    """Return what is measured beside what.

    ``widths`` are measured in every format, with those peers that have it. What hardly depends on
    the format is measured in the first one alone. Memory is measured in the first and the last,
    start in the last, both beside llama.cpp alone: the others take a multiple of either.
    """
    groups: list[tuple[Setting, list[Scenario]]] = []
    for format in formats:
        once = [PROMPTS, Burst(), SHARED_PREFIX, CpuAfterLeave()] if format == formats[0] else []
        groups.append((Setting(format=format), [widths, *once]))
    memory = Memory()
    for format in dict.fromkeys((formats[0], formats[-1])):
        groups.append((memory.setting(format), [memory]))
    groups.append((Setting(format=formats[-1]), [Start()]))
    parts = []
    for setting, every in groups:
        if scenarios := [scenario for scenario in every if scenario.name in chosen]:
            alone = scenarios[0].alone
            without = BF16_ONLY if alone or setting.format != "bf16" else ()
            names = ["", *(peer for peer in peers if peer not in without)]
            servers = [make[name](setting) for name in names]
            title = f"{setting.format}: {', '.join(scenario.name for scenario in scenarios)}"
            # Widths take as long as two other scenarios.
            share = 0.5 if alone else 1.0 * len(servers) * (1 + len(scenarios))
            parts.append(Part(title=title, share=share, run=partial(contest, servers, scenarios)))
    return parts


def decoding_parts(chosen: Sequence[str], peers: Sequence[str], draft_model: str) -> list[Part]:
    """Return what is measured of beams and drafts; only this server drafts from ``draft_model``."""
    parts = []
    if "beam_search" in chosen:
        servers = [SERVERS[name](Setting()) for name in ("", *peers) if name != "llama.cpp"]
        parts.append(Part(title="beam search", share=1.0, run=partial(contest, servers, [Beams()])))
    if "speculation" in chosen:
        kinds = ("", "text", "model") if peers else ("", "text")
        drafts = [(name, kind) for name in ("", *peers) for kind in kinds]
        title, streams = ("speculation_peers", (1,)) if peers else ("speculation", (1, 8, 32))
        if draft_model:
            drafts.append(("", draft_model))
            title, streams = "speculation_draft_model", (1, 8)
        tasks = Speculation(tasks=trio.run(known_tasks), streams=streams, name=title)
        servers = [
            SERVERS[name](Setting(drafts=kind))
            for name, kind in drafts
            if (name, kind) != ("vllm", "model")
        ]
        parts.append(Part(title=title, share=1.0, run=partial(contest, servers, [tasks])))
    return parts


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    peer = "another server, installed first if need be (repeatable)"
    add("--compare", action="append", choices=MAKERS, default=[], help=peer)
    add("--minutes", type=float, help="time; installing and the last round come on top")
    add("--rounds", type=int, help=f"the most rounds (default {_ROUNDS}, {_MOST_ROUNDS} in a time)")
    add("--scenarios", nargs="+", choices=(*SCENARIOS, *DECODING), default=list(SCENARIOS))
    load = "instead of scenarios, any load of trioserve bench, whose options follow"
    add("--load", nargs=argparse.REMAINDER, metavar="OPTION", help=load)
    add("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help="of the weights")
    add("--draft-model", default="", help="folder of one that this server drafts from, too")
    add_save(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line names, and return the exit code."""
    options = _parser().parse_args(arguments)
    # Servers are in sessions of their own: however this program ends, it has to stop them.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    chosen, widths = options.scenarios, THROUGHPUT
    if options.load is not None:
        chosen, widths = ["load"], Loads(name="load", loads=[shlex.join(options.load)])
        try:
            options_of(widths.loads[0])
        except UsageError as error:
            print(f"bench: {error}", file=sys.stderr)
            return 2
    # A developer's shell may hold libraries to one thread, or keep no bytecode; servers start as a
    # user's would.
    foreign = ("OMP_", "KMP_", "MKL_", "PYTHONDONTWRITEBYTECODE")
    for name in [name for name in os.environ if name.startswith(foreign)]:
        del os.environ[name]
    parts = parts_of(chosen, options.formats, options.compare, widths, SERVERS)
    parts += decoding_parts(chosen, options.compare, options.draft_model)
    rounds = options.rounds or (_ROUNDS if options.minutes is None else _MOST_ROUNDS)
    notes = Notes()
    try:
        trio.run(measure, parts, notes, rounds, options.minutes)
    except* KeyboardInterrupt:
        notes.failures.append("interrupted")
    report(notes, options)
    return 1 if notes.failures else 0


def table_name(row: Row) -> str:
    """Return the name of a row's table: formats of the weights are measured one after the other."""
    apart = row.scenario == THROUGHPUT.name and row.format != "bf16"
    return f"{row.scenario}_{row.format}" if apart else row.scenario


def report(notes: Notes, options: argparse.Namespace) -> None:
    """Print tables, targets and failures; save a file for each table if asked."""
    for name in dict.fromkeys(map(table_name, notes.rows)):
        rows = [row for row in notes.rows if table_name(row) == name]
        verdicts = [verdict for verdict in judge(rows) if verdict.met is not None]
        print(f"\n### {name.replace('_', ' ')}\n\n{table(rows)}")
        if verdicts:
            print(f"\n{verdict_table(verdicts)}")
        busy = busy_cases(rows)
        if max(busy.values()) > QUIET:
            print(f"\nthe machine wasn't quiet: {max(busy.values()):.2f} cores were busy elsewhere")
        if options.save:
            facts = {
                "servers": notes.servers[rows[0].scenario],
                "options": asked(options),
                "failures": notes.failures,
                "busy": busy,
                "verdicts": [attrs.asdict(verdict) for verdict in verdicts],
            }
            print(f"\nsaved to {save(options.save, name, table(rows), **facts)}")
    for failure in notes.failures:
        print(f"FAILED: {failure}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
