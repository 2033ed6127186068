"""A long run under mixed load, with clients that leave and workers that are killed: is memory flat?

``python -m tests.faults.soak --seconds 3600``. A closed loop of clients asks a real server for
everything that :func:`tests.faults.load.mixture` has. Some leave before they are answered. In the
first half the worker is killed every few minutes; in the second half the last one is left alone, so
that it is seen whether it grows. The memory of both processes is sampled throughout.

The verdict: no request was lost, nothing is held at the end, and neither process's memory grows.
The slope is that of a straight line through all samples after the warm-up (for the worker: after
the warm-up of each process), and has to stay below the bounds that are given.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import trio

from bench.report import Made, run_script
from bench.servers import MODEL
from tests.faults.load import mixture
from tests.faults.stage import Subject, resident_bytes, serving, verdict_of, worker_of
from trioserve.load import Client

_MIB = 1 << 20
_SAMPLE_INTERVAL = 5.0
_SHORTEST_VERDICT = 1800.0
"""Seconds. A shorter run is over before the libraries have seen most shapes of a batch, and says
nothing of memory."""
GROWTH = {"server": 16.0, "worker": 64.0}
"""The bounds, in MiB an hour."""


@attrs.frozen(kw_only=True)
class Trend:
    """The slope of a line, in units a second, and its standard error, which takes the points for
    independent of each other. NaN where there are too few of them."""

    slope: float
    error: float
    points: int


def trend_of(*lives: Sequence[tuple[float, float]]) -> Trend:
    """Return the common slope of several series of (seconds, value), each with its own level.

    That is how a worker's memory is measured: every new one begins anew.
    """
    products = squares = values = 0.0
    used = [life for life in lives if len(life) > 1]
    for life in used:
        middle = math.fsum(time for time, _ in life) / len(life)
        level = math.fsum(value for _, value in life) / len(life)
        products += math.fsum((time - middle) * (value - level) for time, value in life)
        squares += math.fsum((time - middle) ** 2 for time, _ in life)
        values += math.fsum((value - level) ** 2 for _, value in life)
    count = sum(map(len, used))
    freedom = count - len(used) - 1
    if freedom < 1 or squares == 0:
        return Trend(slope=math.nan, error=math.nan, points=count)
    slope = products / squares
    residual = max(values - slope * products, 0.0)
    return Trend(slope=slope, error=math.sqrt(residual / freedom / squares), points=count)


@attrs.frozen(kw_only=True)
class Scenario:
    """The load and the kills, in seconds; ``leaving`` is the share of requests whose client leaves.

    No worker is killed after ``kill_until`` of the time. ``warm_up`` is that of each process, a
    sixth of a run shorter than an hour: a worker has seen most shapes of a batch by then, for each
    of which its libraries keep code and buffers.
    """

    seconds: float = 3600.0
    clients: int = 12
    leaving: float = 0.2
    kill_every: float = 300.0
    kill_until: float = 0.5
    longest_prompt: int = 400
    longest_output: int = 96
    seed: int = 0
    warm_up: float = 600.0

    @property
    def settled(self) -> float:
        """The age at which a process's memory begins to count."""
        return min(self.warm_up, self.seconds / 6)


@attrs.frozen(kw_only=True)
class Sample:
    """Both processes at one moment, in seconds since the start of the load."""

    time: float
    server_bytes: int
    worker: int | None
    worker_bytes: int


@attrs.define(kw_only=True)
class Soak:
    """One run, and the requests that failed though no client gave them up, by their errors."""

    scenario: Scenario
    subject: Subject
    completed: int = 0
    left: int = 0
    lost: Counter[str] = attrs.field(factory=Counter)
    kills: int = 0
    samples: list[Sample] = attrs.field(factory=list)
    _started: float = 0.0

    async def run(self) -> None:
        """Load, kill and sample until the time is over; then all clients are answered."""
        scenario = self.scenario
        longest = {"longest_prompt": scenario.longest_prompt}
        longest["longest_output"] = scenario.longest_output
        requests = mixture(random.Random(scenario.seed), **longest)
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
            async with Client(self.subject.running.target) as client:
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
            worker, size = worker_of(self.subject.pid), resident_bytes(self.subject.pid)
            own = resident_bytes(worker) if worker is not None else 0
            sizes = {"server_bytes": size, "worker": worker, "worker_bytes": own}
            self.samples.append(Sample(time=self._now, **sizes))
            await trio.sleep(_SAMPLE_INTERVAL)

    def trends(self) -> dict[str, Trend]:
        """Return the growth of both processes, bytes a second; each counts from its warm-up on."""
        settled = self.scenario.settled
        of_server = [(s.time, s.server_bytes) for s in self.samples if s.time >= settled]
        lives: dict[int, list[Sample]] = {}
        for sample in self.samples:
            if sample.worker is not None and sample.worker_bytes:
                lives.setdefault(sample.worker, []).append(sample)
        of_workers = [
            [(s.time, s.worker_bytes) for s in life if s.time - life[0].time >= settled]
            for life in lives.values()
        ]
        return {"server": trend_of(of_server), "worker": trend_of(*of_workers)}


def figures_of_soak(
    soak: Soak, at_rest: Mapping[str, float], descriptors: tuple[int, int]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a table's figures, and the verdict with its facts.

    ``at_rest`` are the server's metrics once it was idle again, ``descriptors`` those that it had
    while it was idle, before and after.
    """
    lost, last = sum(soak.lost.values()), soak.samples[-1]
    figures: dict[str, Any] = {
        "requests answered": soak.completed - lost,
        "requests left by their clients": soak.left,
        "requests lost": lost,
        "worker kills": soak.kills,
        "steps": int(at_rest["worker_steps_total"]),
    }
    flat: dict[str, bool | None] = {}
    sizes = {"server": last.server_bytes, "worker": last.worker_bytes}
    for name, trend in soak.trends().items():
        grown, error = (each * 3600 / _MIB for each in (trend.slope, trend.error))
        figures[f"{name}'s memory at the end, MiB"] = round(sizes[name] / _MIB, 1)
        about = f"{grown:.2f} ± {error:.2f} (bound {GROWTH[name]:g})"
        figures[f"{name}'s growth, MiB/h"] = about
        # A line through few points can't be told from their scatter: its error counts, too.
        flat[name] = grown - 2 * error <= GROWTH[name]
    if soak.scenario.seconds < _SHORTEST_VERDICT:
        flat = dict.fromkeys(flat)
        figures["memory"] = "too short a run to tell"
    passed = not lost and False not in flat.values() and descriptors[1] <= descriptors[0] + 2
    figures["verdict"] = "passed" if passed else "FAILED"
    facts = {"passed": passed, "flat": flat, "lost": dict(soak.lost), "descriptors": descriptors}
    return figures, facts


async def measure(options: argparse.Namespace) -> Made:
    """Return the figures as a table."""
    names = ("seconds", "clients", "kill_every", "leaving", "seed")
    scenario = Scenario(**{name: getattr(options, name) for name in names})
    given = ["--dtype", options.dtype, "--kv-cache-memory-bytes", options.kv_cache]
    given += ["--num-threads", str(options.num_threads), "--max-model-len", "2048"]
    async with serving(*given, model=options.model) as subject:
        run = Soak(scenario=scenario, subject=subject)
        await subject.wait_idle()
        before = subject.descriptors()
        await run.run()
        at_rest = await subject.wait_idle()
        figures, facts = figures_of_soak(run, at_rest, (before, subject.descriptors()))
    return verdict_of("soak", figures, **facts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a soak; return 1 if it didn't pass. The KV cache is small, so that it is reused."""
    return run_script(
        *("faults_soak", measure, arguments),
        **{"model": MODEL, "seconds": 3600.0, "clients": 12, "kill_every": 300.0, "leaving": 0.2},
        **{"seed": 0, "dtype": "bfloat16", "kv_cache": "96MiB", "num_threads": 1},
    )


if __name__ == "__main__":
    raise SystemExit(main())
