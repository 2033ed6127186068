"""What the garbage collector costs a server that streams: ``python -m bench.collector``.

A server over a worker that computes nothing is asked by many streams at once, in rounds: each
setting of the collector gets a process of its own, which counts how long every collection held up
the event loop. The requests are the same for all.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import trio

from bench.report import machine, own_versions
from trioserve.config import EngineConfig, ServerConfig
from trioserve.front_ends.serving import serve
from trioserve.protocol.wire import MockSteps

_RESULTS = Path(__file__).parent / "results"
_MODEL = "smollm2-135m"

SETTINGS: Mapping[str, tuple[bool, int | None]] = {
    "Python's own": (False, None),
    "frozen": (True, None),
    "frozen, 5,000": (True, 5_000),
    "frozen, 20,000": (True, 20_000),
    "frozen, 50,000": (True, 50_000),
}
"""Whether what is there at the start is left out from then on, and the first threshold."""


class Pauses:
    """The collections of a process, by generation, in seconds of the thread's CPU time."""

    def __init__(self) -> None:
        self.seconds: list[list[float]] = [[], [], []]
        self._begun = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._begun = time.thread_time()
        else:
            self.seconds[info["generation"]].append(time.thread_time() - self._begun)

    def figures(self) -> dict[str, Any]:
        """Totals and the longest, in milliseconds."""
        pauses = [pause for each in self.seconds for pause in each]
        return {
            "collections": [len(each) for each in self.seconds],
            "total_ms": 1000 * sum(pauses),
            "longest_ms": [1000 * max(each, default=0.0) for each in self.seconds],
        }


async def _serve(name: str, streams: int) -> None:
    """The server's process: says where it listens, and at the end of its input what it cost."""
    frozen, threshold = SETTINGS[name]
    shutdown = trio.Event()
    config = ServerConfig(
        engine=EngineConfig(_MODEL, max_num_seqs=streams), port=0, log_level="warning"
    )
    async with trio.open_nursery() as nursery:
        served = functools.partial(
            serve, config, shutdown=shutdown, mock=MockSteps(step_seconds=0.01)
        )
        (url,) = await nursery.start(served)
        if frozen:
            gc.collect()
            gc.freeze()
        if threshold is not None:
            gc.set_threshold(threshold, 10, 10)
        pauses, cpu = Pauses(), time.process_time()
        print(url, flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)
        cpu = time.process_time() - cpu
        print(json.dumps({**pauses.figures(), "cpu_seconds": cpu}), flush=True)
        shutdown.set()


def _measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    server = [sys.executable, "-m", "bench.collector", "--serve", name]
    server += ["--streams", str(options.streams)]
    with subprocess.Popen(
        server, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        client = [sys.executable, "-m", "trioserve", "bench", url, "--warmup", "0"]
        client += ["--concurrency", str(options.streams), "--num-prompts", str(options.requests)]
        client += ["--input-tokens", "32", "--output-tokens", str(options.tokens)]
        subprocess.run(client, check=True, stdout=subprocess.DEVNULL)
        process.stdin.close()
        found = dict(json.loads(process.stdout.readline()))
    found["microseconds_per_token"] = (
        1e6 * found["cpu_seconds"] / (options.requests * options.tokens)
    )
    return found


def _table(found: Mapping[str, list[dict[str, Any]]]) -> str:
    """A Markdown table of the rounds' medians."""
    lines = [
        "| collector | µs of CPU per token | collections 0 · 1 · 2 | longest ms 0 · 1 · 2 "
        "| all together ms |",
        "|---|---|---|---|---|",
    ]
    for name, rounds in found.items():
        cells = [
            name,
            f"{statistics.median(each['microseconds_per_token'] for each in rounds):.1f}",
            " · ".join(_medians(rounds, "collections", "{:.0f}")),
            " · ".join(_medians(rounds, "longest_ms", "{:.1f}")),
            f"{statistics.median(each['total_ms'] for each in rounds):.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _medians(rounds: list[dict[str, Any]], name: str, form: str) -> list[str]:
    """For each generation."""
    return [
        form.format(statistics.median(each[name][generation] for each in rounds))
        for generation in range(3)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.collector", description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=_RESULTS)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        trio.run(_serve, options.serve, options.streams)
        return 0
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in SETTINGS}
    for _ in range(options.rounds):
        for name, rounds in found.items():
            rounds.append(_measure(name, options))
            print(f"{name}: {rounds[-1]}", file=sys.stderr, flush=True)
    print(_table(found))
    now = datetime.now(UTC)
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / f"collector-{now:%Y%m%d-%H%M%S}.json"
    facts = {
        "time": now.isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": own_versions(),
        "options": {name: str(value) for name, value in vars(options).items()},
        "settings": found,
        "table": _table(found),
    }
    path.write_text(json.dumps(facts, indent=2) + "\n")
    print(f"saved {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
