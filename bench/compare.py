"""This server beside others, on one machine in one run.

``python -m bench.compare --compare llama.cpp --compare vllm --minutes 20`` measures everything as
often as fits into the time, and at least once. It prints a table for each scenario and the targets
beside what was reached, and saves all of it as JSON. Exit code 1: something failed, or a run wasn't
valid.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import attrs
import trio

from bench.contest import Notes, contest, one_by_one
from bench.cpu_after_leave import CpuAfterLeave
from bench.goals import goals_table, judge
from bench.loads import Load, load_of
from bench.memory import Memory
from bench.peers import BF16_ONLY, SERVERS
from bench.peers.gguf_files import FORMATS
from bench.peers.own_server import own_server
from bench.report import save, tables
from bench.rows import QUIET, busy_elsewhere
from bench.scenario import Lonely, Scenario
from bench.servers import Server
from bench.setting import Setting
from bench.shared_prefix import SharedPrefix
from bench.start import Start
from bench.throughput import Throughput
from trioserve.cli.usage import UsageError

__all__ = ["SCENARIOS", "Part", "main", "measure", "parts_of"]

SCENARIOS = ("throughput", "shared_prefix", "cpu_after_leave", "memory", "start")
"""What the targets are about."""


RESULTS = Path(__file__).parent / "results"
_ROUNDS = 3
_MOST_ROUNDS = 9
# The weight of a part's time: of each scenario on each server, and of what is measured alone.
_SHARE, _SHARE_ALONE = 1.0, 0.5


@attrs.frozen(kw_only=True)
class Part:
    """Servers that are measured side by side; ``share`` weighs its part of the time.

    ``run`` takes the most rounds and a deadline.
    """

    title: str
    share: float
    run: Callable[[Notes, int, float], Awaitable[None]]


async def measure(parts: Sequence[Part], notes: Notes, rounds: int, minutes: float | None) -> None:
    """Run each part; what one doesn't need of its time goes to those after it."""
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
    widths: Throughput | Load,
    make: Callable[[str, Setting], Server],
) -> list[Part]:
    """What is measured beside what.

    Widths are measured in every format, with those peers that have it. What hardly depends on the
    format is measured in the first one alone. Memory is measured in the first and the last, start
    in the last, both beside llama.cpp alone: the others take a multiple of either.

    Args:
        chosen: names of scenarios.
        formats: of :data:`bench.peers.gguf_files.FORMATS`.
        peers: the names of other servers.
        widths: what is measured in every format.
        make: a server by its name.
    """
    parts = []
    for format in formats:
        every: list[Scenario] = [widths]
        if format == formats[0]:
            every += [SharedPrefix(), CpuAfterLeave()]
        scenarios = [scenario for scenario in every if scenario.name in chosen]
        names = ["", *(peer for peer in peers if format == "bf16" or peer not in BF16_ONLY)]
        if scenarios:
            servers = [make(name, Setting(format=format)) for name in names]
            parts.append(
                Part(
                    title=f"{format}: {', '.join(s.name for s in scenarios)}",
                    # Widths take as long as two other scenarios.
                    share=_SHARE * len(servers) * (1 + len(scenarios)),
                    run=partial(_together, servers, scenarios),
                )
            )
    alone: dict[Lonely, Sequence[str]] = {
        Memory(): list(dict.fromkeys((formats[0], formats[-1]))),
        Start(): [formats[-1]],
    }
    for scenario in [scenario for scenario in alone if scenario.name in chosen]:
        names = ["", *(peer for peer in peers if peer not in BF16_ONLY)]
        for format in alone[scenario]:
            servers = [make(name, scenario.setting(format)) for name in names]
            title = f"{format}: {scenario.name}"
            run = partial(_alone, servers, scenario)
            parts.append(Part(title=title, share=_SHARE_ALONE, run=run))
    return parts


async def _together(
    servers: list[Server],
    scenarios: list[Scenario],
    notes: Notes,
    rounds: int,
    deadline: float,
) -> None:
    await contest(servers, scenarios, notes, rounds=rounds, deadline=deadline)


async def _alone(
    servers: list[Server], scenario: Lonely, notes: Notes, rounds: int, deadline: float
) -> None:
    await one_by_one(servers, scenario, notes, rounds=rounds, deadline=deadline)


def _make(name: str, setting: Setting) -> Server:
    return SERVERS[name](setting) if name else own_server(setting)


def _parser(scenarios: Sequence[str] | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--compare",
        action="append",
        choices=[*SERVERS, "none"],
        help="another server, installed first if need be (repeatable)",
    )
    add(
        "--minutes",
        type=float,
        help="time for all of it; installing and the last round come on top",
    )
    add("--rounds", type=int, help=f"the most rounds (default {_ROUNDS}, {_MOST_ROUNDS} in a time)")
    if scenarios is None:
        add("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
        load = "instead of scenarios, any load of trioserve bench, whose options follow"
        add("--load", nargs=argparse.REMAINDER, metavar="OPTION", help=load)
    add("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help="of the weights")
    add("--streams", type=int, nargs="+", default=[1, 8, 32], help="widths of the closed loops")
    add("--requests-per-stream", type=int, default=2, help="requests of each stream in a round")
    add("--prompt-tokens", type=int, default=128, help="tokens in each prompt")
    add("--output-tokens", type=int, default=128, help="tokens in each answer")
    add("--plots", action="store_true", help="draw what was measured (needs the extra bench)")
    add("--out", type=Path, default=RESULTS, help="folder for the results")
    return parser


def main(arguments: Sequence[str] | None = None, scenarios: Sequence[str] | None = None) -> int:
    """Measure ``scenarios``, or those that the command line names, and return the exit code."""
    options = _parser(scenarios).parse_args(arguments)
    # Servers are in sessions of their own: whoever ends this program, it has to stop them.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    chosen, widths = scenarios or options.scenarios, _throughput(options)
    if scenarios is None and options.load is not None:
        try:
            chosen, widths = ["load"], load_of(options.load)
        except UsageError as error:
            print(f"bench: {error}", file=sys.stderr)
            return 2
    # A developer's shell may hold libraries to one thread; servers start as a user's would.
    for name in [name for name in os.environ if name.startswith(("OMP_", "KMP_", "MKL_"))]:
        del os.environ[name]
    peers = [name for name in options.compare or [] if name != "none"]
    parts = parts_of(chosen, options.formats, peers, widths, _make)
    rounds = options.rounds or (_ROUNDS if options.minutes is None else _MOST_ROUNDS)
    notes = Notes()
    name = "compare" if scenarios is None else chosen[0]
    try:
        trio.run(measure, parts, notes, rounds, options.minutes)
    except* KeyboardInterrupt:
        notes.failures.append("interrupted")
    finally:
        path = _save(notes, name, options)
    verdicts = judge(notes.rows)
    decided = [verdict for verdict in verdicts if verdict.met is not None]
    print(f"\n{tables(notes.rows)}\n\n{goals_table(decided) if decided else ''}")
    if len(decided) < len(verdicts):
        print(f"\n{len(verdicts) - len(decided)} targets need more scenarios or servers")
    if (busy := busy_elsewhere(notes.rows) or 0.0) > QUIET:
        print(f"\nthe machine wasn't quiet: {busy:.2f} cores were busy with something else")
    for failure in notes.failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    print(f"\nsaved to {os.path.relpath(path)}")
    if options.plots:
        from bench.pictures import save_pictures  # needs matplotlib, which is optional

        for picture in save_pictures(notes.runs, path.with_suffix("")):
            print(f"saved to {os.path.relpath(picture)}")
    return 1 if notes.failures else 0


def _throughput(options: argparse.Namespace) -> Throughput | Load:
    return Throughput(
        streams=options.streams,
        requests_per_stream=options.requests_per_stream,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
    )


def _save(notes: Notes, name: str, options: argparse.Namespace) -> Path:
    facts = {
        "options": {key: value for key, value in vars(options).items() if key != "out"},
        "servers": notes.versions,
        "failures": notes.failures,
    }
    return save(options.out, name, notes.rows, facts)


if __name__ == "__main__":
    sys.exit(main())
