"""Closed loops of several widths against this server and a peer, round by round in one run.

``python -m bench.throughput --help`` has the options. A run fails if any request does, if any
answer isn't exactly as long as asked for, or if the servers' answers have little in common.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import attrs
import trio

from bench.peers.transformers_serve import transformers_server
from bench.prompts import exact_prompts
from bench.report import Measurement, own_versions, save, table
from bench.servers import MODEL, Running, Server, ServerFailed, running, trioserve_server
from trioserve.load import Run, closed_loop, figures_of
from trioserve.model_files import locate, open_model

__all__ = ["InvalidRun", "Scenario", "add_options", "compare", "main", "scenario_of"]

_RESULTS = Path(__file__).parent / "results"
# So much of the beginning of two answers is compared, and so many of the answers must agree.
_SAME_CHARACTERS = 12
_SAME_ANSWERS = 0.5
_WARM_UP_TOKENS = 8


class InvalidRun(Exception):
    """What was measured isn't what was to be measured."""


@attrs.frozen(kw_only=True)
class Scenario:
    """What is asked of every server."""

    streams: list[int]
    rounds: int
    requests_per_stream: int
    prompt_tokens: int
    output_tokens: int
    seed: int


@attrs.frozen(kw_only=True)
class Outcome:
    """All that a comparison measured; memory in bytes, by server."""

    measurements: list[Measurement]
    peak_memory: dict[str, int]


async def compare(servers: Sequence[Server], scenario: Scenario) -> Outcome:
    """Measure ``servers`` in turn in each round.

    Raises:
        InvalidRun: a request failed, or its answer isn't what was asked for.
        ServerFailed: a server doesn't start.
    """
    batches = _batches(scenario)
    measurements: list[Measurement] = []
    async with AsyncExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        up: list[Running] = []
        for server in servers:
            print(f"starting {server.name}", flush=True)
            up.append(await stack.enter_async_context(running(server, logs / server.name)))
        await _warm_up(up, batches, scenario)
        for round in range(scenario.rounds):
            for streams in scenario.streams:
                measurements += await _one_turn(up, round, streams, batches, scenario)
        memory = {one.server.name: one.peak_memory_bytes() for one in up}
    return Outcome(measurements=measurements, peak_memory=memory)


def _batches(scenario: Scenario) -> dict[tuple[int, int], list[str]]:
    """The prompts of each (round, streams), round -1 being the warm-up; each prompt occurs once."""
    sizes = {(-1, streams): streams for streams in scenario.streams}
    for round in range(scenario.rounds):
        for streams in scenario.streams:
            sizes[round, streams] = streams * scenario.requests_per_stream
    tokenizer = open_model(locate(MODEL)).load_tokenizer()
    count = sum(sizes.values())
    prompts = iter(exact_prompts(tokenizer, count, scenario.prompt_tokens, scenario.seed))
    return {key: [next(prompts) for _ in range(size)] for key, size in sizes.items()}


async def _warm_up(
    up: Sequence[Running], batches: dict[tuple[int, int], list[str]], scenario: Scenario
) -> None:
    for one in up:
        print(f"warming up {one.server.name}", flush=True)
        for streams in scenario.streams:
            requests = [
                {"prompt": prompt, "max_tokens": _WARM_UP_TOKENS} for prompt in batches[-1, streams]
            ]
            run = await closed_loop(one.target, requests, streams)
            check(one.server.name, run, scenario.prompt_tokens, _WARM_UP_TOKENS)


async def _one_turn(
    up: Sequence[Running],
    round: int,
    streams: int,
    batches: dict[tuple[int, int], list[str]],
    scenario: Scenario,
) -> list[Measurement]:
    """Every server once; who goes first changes from round to round."""
    requests = [
        {"prompt": prompt, "max_tokens": scenario.output_tokens}
        for prompt in batches[round, streams]
    ]
    measurements = []
    runs: dict[str, Run] = {}
    for one in up if round % 2 == 0 else reversed(up):
        name = one.server.name
        run = await closed_loop(one.target, requests, streams)
        check(name, run, scenario.prompt_tokens, scenario.output_tokens)
        figures = figures_of(run)
        rate = figures.output_tokens_per_second
        print(f"round {round + 1}, {streams:3} streams, {name:14} {rate:8.1f} tokens/s", flush=True)
        measurements.append(Measurement(server=name, round=round, figures=figures))
        runs[name] = run
    check_agreement([runs[one.server.name] for one in up])
    return measurements


def check(name: str, run: Run, prompt_tokens: int, output_tokens: int) -> None:
    """Every request was answered, and with exactly the work asked for.

    Raises:
        InvalidRun: one wasn't.
    """
    for record in run.records:
        if record.error:
            raise InvalidRun(f"{name}: a request failed: {record.error}")
        counted = (record.prompt_tokens, record.completion_tokens)
        if counted != (prompt_tokens, output_tokens):
            raise InvalidRun(
                f"{name} counts {counted[0]} tokens in and {counted[1]} out, "
                f"not {prompt_tokens} and {output_tokens}"
            )
        if not record.text:
            raise InvalidRun(f"{name}: an answer has no text")


def check_agreement(runs: Sequence[Run]) -> None:
    """Most answers begin alike on all servers: greedy decoding of one model, up to rounding.

    Raises:
        InvalidRun: they don't.
    """
    answers = list(zip(*([record.text for record in run.records] for run in runs), strict=True))
    same = sum(len({text[:_SAME_CHARACTERS] for text in texts}) == 1 for texts in answers)
    if same < _SAME_ANSWERS * len(answers):
        raise InvalidRun(f"only {same} of {len(answers)} answers begin alike on all servers")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of a scenario."""
    add = parser.add_argument
    add("--streams", type=int, nargs="+", default=[1, 8, 32], help="widths of the closed loops")
    add("--rounds", type=int, default=3, help="how often everything is measured")
    add("--requests-per-stream", type=int, default=2, help="requests of each stream in a round")
    add("--prompt-tokens", type=int, default=128, help="tokens in each prompt")
    add("--output-tokens", type=int, default=128, help="tokens in each answer")
    add("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="on all servers")
    add("--seed", type=int, default=0, help="seed of the prompts")
    add("--peer-python", help="python of an environment that has the peer (default: make one)")
    add("--out", type=Path, default=_RESULTS, help="folder for the results")


def scenario_of(options: argparse.Namespace) -> Scenario:
    """The scenario that the options ask for."""
    values: dict[str, Any] = {f.name: getattr(options, f.name) for f in attrs.fields(Scenario)}
    return Scenario(**values)


def run(servers: Sequence[Server], options: argparse.Namespace) -> int:
    """Compare, print the table, save the results, and return the exit code."""
    scenario = scenario_of(options)
    try:
        outcome = trio.run(compare, servers, scenario)
    except (InvalidRun, ServerFailed) as failure:
        print(f"bench: {failure}", file=sys.stderr)
        return 1
    names = [server.name for server in servers]
    print("\n" + table(outcome.measurements, names) + "\n")
    for name in names:
        print(f"{name}: peak memory {outcome.peak_memory[name] / 2**30:.1f} GiB")
    facts = {
        "scenario": attrs.asdict(scenario),
        "dtype": options.dtype,
        "servers": {server.name: dict(server.versions) for server in servers},
        "peak_memory_bytes": outcome.peak_memory,
    }
    path = save(options.out, "throughput", outcome.measurements, facts)
    print(f"saved to {os.path.relpath(path)}")
    return 0


def main() -> int:
    """This project's server beside a peer, or alone."""
    parser = argparse.ArgumentParser(prog="python -m bench.throughput", description=__doc__)
    parser.add_argument(
        "--compare", choices=["transformers", "none"], default="transformers", help="the peer"
    )
    add_options(parser)
    options = parser.parse_args()
    servers = [trioserve_server(options.dtype, own_versions())]
    if options.compare == "transformers":
        servers.append(transformers_server(options.dtype, options.peer_python))
    return run(servers, options)


if __name__ == "__main__":
    sys.exit(main())
