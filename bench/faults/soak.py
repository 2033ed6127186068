"""A long run under mixed load, with clients that leave and workers that are killed: is memory flat?

``python -m bench.faults.soak --seconds 3600``. A closed loop of clients asks a real server for
everything that :mod:`bench.faults.mixture` has. Some leave before they are answered. In the first
half the worker is killed every few minutes; in the second half the last one is left alone, so that
it is seen whether it grows. The memory of both processes is sampled throughout.

The verdict: no request was lost, nothing is held at the end, and neither process's memory grows.
The slope is that of a straight line through all samples after the warm-up (for the worker: after
the warm-up of each process), and has to stay below the bounds that are given.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import trio

from bench.faults.mixture import mixture
from bench.faults.results import RESULTS, markdown, save
from bench.faults.server import Subject, serving
from bench.faults.trend import Trend, trend_of
from bench.servers import MODEL
from trioserve.load import Client

_MIB = 1 << 20
_SAMPLE_INTERVAL = 5.0
_SHORTEST_VERDICT = 1800.0
"""Seconds. A shorter run is over before the libraries have seen most shapes of a batch, and says
nothing of memory."""


@attrs.frozen(kw_only=True)
class Scenario:
    """What is done, and what is allowed. Times in seconds, growth in MiB an hour."""

    seconds: float = 3600.0
    clients: int = 12
    leaving: float = 0.2
    """Share of the requests whose client leaves at a random moment."""
    kill_every: float = 300.0
    kill_until: float = 0.5
    """Share of the time after which no worker is killed any more."""
    longest_prompt: int = 400
    longest_output: int = 96
    seed: int = 0
    warm_up: float = 600.0
    """Of each process; of a run shorter than an hour, a sixth of the run. A worker has seen most
    shapes of a batch by then, for each of which its libraries keep code and buffers."""
    server_growth: float = 16.0
    worker_growth: float = 64.0

    @property
    def settled(self) -> float:
        """Age at which a process's memory begins to count."""
        return min(self.warm_up, self.seconds / 6)


@attrs.frozen(kw_only=True)
class Sample:
    """Both processes at one moment, in seconds since the start of the load."""

    time: float
    server_bytes: int
    server_descriptors: int
    server_threads: int
    worker: int | None
    worker_bytes: int


@attrs.define(kw_only=True)
class Soak:
    """One run, and what it saw."""

    scenario: Scenario
    subject: Subject
    completed: int = 0
    left: int = 0
    tokens: int = 0
    lost: Counter[str] = attrs.field(factory=Counter)
    """Requests that failed though nobody gave them up, by their errors."""
    kills: int = 0
    samples: list[Sample] = attrs.field(factory=list)
    _started: float = 0.0

    async def run(self) -> None:
        """Load, kills and samples until the time is over; then all clients are answered."""
        scenario = self.scenario
        requests = mixture(
            random.Random(scenario.seed),
            longest_prompt=scenario.longest_prompt,
            longest_output=scenario.longest_output,
        )
        self._started = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._sample)
            nursery.start_soon(self._kill)
            async with trio.open_nursery() as clients:
                for number in range(scenario.clients):
                    clients.start_soon(self._ask, requests, random.Random(f"client {number}"))
            nursery.cancel_scope.cancel()

    @property
    def _now(self) -> float:
        return trio.current_time() - self._started

    async def _ask(self, requests: Iterator[dict[str, Any]], numbers: random.Random) -> None:
        while self._now < self.scenario.seconds:
            async with Client(self.subject.target) as client:
                # Some requests share a connection; one that was left closes it.
                for _ in range(numbers.randint(1, 4)):
                    leaves = numbers.random() < self.scenario.leaving
                    patience = numbers.uniform(0, 3) ** 2 if leaves else math.inf
                    with trio.move_on_after(patience) as scope:
                        record = await client.send(next(requests))
                    if scope.cancelled_caught:
                        self.left += 1
                        break
                    self.completed += 1
                    self.tokens += record.completion_tokens or 0
                    if record.error or record.finish_reason is None:
                        self.lost[record.error or "the stream ended early"] += 1
                        break

    async def _kill(self) -> None:
        while True:
            await trio.sleep(self.scenario.kill_every)
            if self._now > self.scenario.seconds * self.scenario.kill_until:
                return
            self.kills += self.subject.signal_worker()

    async def _sample(self) -> None:
        while True:
            worker = self.subject.worker()
            of_server, of_worker = self.subject.footprints()
            self.samples.append(
                Sample(
                    time=self._now,
                    server_bytes=of_server.resident_bytes,
                    server_descriptors=of_server.descriptors,
                    server_threads=of_server.threads,
                    worker=worker,
                    worker_bytes=0 if of_worker is None else of_worker.resident_bytes,
                )
            )
            await trio.sleep(_SAMPLE_INTERVAL)

    def server_trend(self) -> Trend:
        """Of the server's memory, bytes a second."""
        settled = self.scenario.settled
        return trend_of([(s.time, s.server_bytes) for s in self.samples if s.time >= settled])

    def worker_trend(self) -> Trend:
        """Of the workers' memory, bytes a second; each counts from its warm-up on."""
        lives: dict[int, list[Sample]] = {}
        for sample in self.samples:
            if sample.worker is not None and sample.worker_bytes:
                lives.setdefault(sample.worker, []).append(sample)
        settled = self.scenario.settled
        return trend_of(
            *(
                [(s.time, s.worker_bytes) for s in life if s.time - life[0].time >= settled]
                for life in lives.values()
            )
        )


def _per_hour(trend: Trend) -> tuple[float, float]:
    return trend.slope * 3600 / _MIB, trend.error * 3600 / _MIB


def figures_of_soak(
    soak: Soak, at_rest: Mapping[str, float], descriptors: tuple[int, int]
) -> dict[str, Any]:
    """What a run showed, and the verdict.

    Args:
        soak: the run.
        at_rest: the server's metrics once it had nothing to do any more.
        descriptors: the server's, before and after, while it had nothing to do.
    """
    scenario = soak.scenario
    of_server, of_worker = _per_hour(soak.server_trend()), _per_hour(soak.worker_trend())
    # A straight line through few points can't be told from their scatter: its error counts, too.
    flat: dict[str, bool | None] = {
        "server": of_server[0] - 2 * of_server[1] <= scenario.server_growth,
        "worker": of_worker[0] - 2 * of_worker[1] <= scenario.worker_growth,
    }
    if scenario.seconds < _SHORTEST_VERDICT:
        flat = dict.fromkeys(flat)
    settled = [s for s in soak.samples if s.time >= scenario.settled]
    return {
        "completed": soak.completed,
        "left_by_their_clients": soak.left,
        "lost": dict(soak.lost),
        "worker_kills": soak.kills,
        "worker_restarts": int(at_rest["worker_restarts_total"]),
        "preemptions": int(at_rest["num_preemptions_total"]),
        "steps": int(at_rest["worker_steps_total"]),
        "output_tokens": int(at_rest["generation_tokens_total"]),
        "server_mib": {
            "after_warm_up": round(settled[0].server_bytes / _MIB, 1) if settled else None,
            "end": round(soak.samples[-1].server_bytes / _MIB, 1),
            "growth_per_hour": round(of_server[0], 2),
            "standard_error": round(of_server[1], 2),
            "bound_per_hour": scenario.server_growth,
        },
        "worker_mib": {
            "end": round(soak.samples[-1].worker_bytes / _MIB, 1),
            "growth_per_hour": round(of_worker[0], 2),
            "standard_error": round(of_worker[1], 2),
            "bound_per_hour": scenario.worker_growth,
        },
        "descriptors": {"idle_before": descriptors[0], "idle_after": descriptors[1]},
        "flat": flat,
        "passed": bool(
            not soak.lost and False not in flat.values() and descriptors[1] <= descriptors[0] + 2
        ),
        "samples": [attrs.asdict(sample) for sample in soak.samples],
    }


async def soak(scenario: Scenario, model: str, options: Sequence[str]) -> dict[str, Any]:
    """Run ``scenario`` on a server of ``model`` with command line ``options``; the figures."""
    async with serving(*options, model=model) as subject:
        run = Soak(scenario=scenario, subject=subject)
        await subject.wait_idle()
        before = subject.footprints()[0].descriptors
        await run.run()
        at_rest = await subject.wait_idle()
        after = subject.footprints()[0].descriptors
        return figures_of_soak(run, at_rest, (before, after))


def table(figures: dict[str, Any]) -> str:
    """The figures for people."""
    lost = sum(figures["lost"].values())
    rows: list[tuple[str, object]] = [
        ("requests answered", figures["completed"] - lost),
        ("requests left by their clients", figures["left_by_their_clients"]),
        ("requests lost", lost),
        ("worker kills", figures["worker_kills"]),
        ("steps", figures["steps"]),
    ]
    for name in ("server", "worker"):
        memory = figures[f"{name}_mib"]
        grown = f"{memory['growth_per_hour']} ± {memory['standard_error']}"
        rows.append((f"{name}'s memory at the end, MiB", memory["end"]))
        rows.append(
            (f"{name}'s growth, MiB/h", f"{grown} (bound {memory['bound_per_hour']:g})"),
        )
    if None in figures["flat"].values():
        rows.append(("memory", "too short a run to tell"))
    rows.append(("verdict", "passed" if figures["passed"] else "FAILED"))
    return markdown(("soak", ""), rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a soak, print its table and save its record. 1 if it didn't pass."""
    parser = argparse.ArgumentParser(prog="python -m bench.faults.soak", description=__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--kill-every", type=float, default=300.0, metavar="SECONDS")
    parser.add_argument("--leaving", type=float, default=0.2, metavar="SHARE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-cache", default="96MiB", help="small, so that it is full and reused")
    parser.add_argument("--num-threads", default="1")
    given = parser.parse_args(arguments)
    scenario = Scenario(
        seconds=given.seconds,
        clients=given.clients,
        kill_every=given.kill_every,
        leaving=given.leaving,
        seed=given.seed,
    )
    options = [
        *("--dtype", given.dtype, "--kv-cache-memory-bytes", given.kv_cache),
        *("--num-threads", given.num_threads, "--max-model-len", "2048"),
    ]
    figures = trio.run(soak, scenario, given.model, options)
    print(table(figures))
    for error, count in figures["lost"].items():
        print(f"lost {count}: {error}", file=sys.stderr)
    path = save(RESULTS, "soak", {**vars(given), **attrs.asdict(scenario)}, figures)
    print(f"saved {path}")
    return 0 if figures["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
