"""Workers killed under load: is anything lost, does a token differ, and how long is the pause?

``python -m bench.faults.kills``. A set of requests is answered once undisturbed. Then a closed loop
of clients asks for them again and again from the same server, while its worker is killed with
SIGKILL at random moments. Every answer has to be the undisturbed one (:mod:`bench.faults.answers`).

The next kill comes at a random time after the worker has given a token: deaths without progress are
counted by the engine, which gives up after ``--max-worker-restarts`` of them.
"""

from __future__ import annotations

import argparse
import bisect
import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import trio

from bench.faults.answers import Difference, first_difference
from bench.faults.margins import real_differences
from bench.faults.mixture import texts
from bench.faults.results import RESULTS, markdown, save, spread
from bench.faults.server import Subject, serving
from bench.faults.stage import tiny_model
from bench.servers import MODEL
from trioserve.load import Client, Record, closed_loop

_IN_FLIGHT = 0.05
"""Seconds that what a worker had sent before its death may take to the client."""


@attrs.frozen(kw_only=True)
class Scenario:
    """What is done. Times in seconds."""

    kills: int = 100
    clients: int = 8
    requests: int = 32
    output_tokens: int = 128
    mean_interval: float = 1.5
    """Between a new worker's first token and its death; exponential."""
    seed: int = 0


@attrs.frozen(kw_only=True)
class Kill:
    """One kill, on trio's clock: the moment, when the next worker was attached, and the first token
    that came to any client after that."""

    killed: float
    attached: float
    next_token: float = 0.0


@attrs.frozen(kw_only=True)
class Outcome:
    """One answer of the disturbed run. ``kills`` is how many fell into it."""

    request: int
    record: Record
    kills: int
    difference: Difference | None


def requests_for(scenario: Scenario) -> list[dict[str, Any]]:
    """Half of them greedy, half sampled with a seed; prompts of 5 to 60 words."""
    numbers = random.Random(scenario.seed)
    prompts = texts(numbers, 5, 60)
    return [
        {
            "prompt": next(prompts),
            "max_tokens": scenario.output_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
            "temperature": 0.0 if index % 2 else 0.8,
            "seed": index,
        }
        for index in range(scenario.requests)
    ]


@attrs.define(kw_only=True)
class Kills:
    """One run over a healthy server."""

    scenario: Scenario
    subject: Subject
    requests: list[dict[str, Any]]
    undisturbed: list[Record] = attrs.field(factory=list)
    records: list[tuple[int, Record]] = attrs.field(factory=list)
    kills: list[Kill] = attrs.field(factory=list)
    _done: bool = False

    async def run(self) -> None:
        """The undisturbed answers, then the disturbed ones."""
        run = await closed_loop(self.subject.target, self.requests, self.scenario.clients)
        failed = [record.error for record in run.records if not self._whole(record)]
        assert not failed, f"undisturbed requests failed: {set(failed)}"
        self.undisturbed = run.records
        numbers = random.Random(self.scenario.seed + 1)
        async with trio.open_nursery() as nursery:
            for number in range(self.scenario.clients):
                nursery.start_soon(self._ask, random.Random(number))
            for _ in range(self.scenario.kills):
                await trio.sleep(numbers.expovariate(1 / self.scenario.mean_interval))
                self.kills.append(await self.disturb())
            self._done = True

    async def _ask(self, numbers: random.Random) -> None:
        async with Client(self.subject.target) as client:
            while not self._done:
                index = numbers.randrange(len(self.requests))
                self.records.append((index, await client.send(self.requests[index])))

    async def disturb(self) -> Kill:
        """Kill the worker, and wait until its successor has made progress."""
        with trio.fail_after(300):
            killed = await self.kill()
            return await self.recovery(killed)

    async def kill(self) -> float:
        """Kill the worker, and wait until that has been noticed; when it was killed."""
        while not self.subject.signal_worker():
            await trio.sleep(0.01)
        killed = trio.current_time()
        while await self.subject.healthy():
            await trio.sleep(0.002)
        return killed

    async def recovery(self, killed: float) -> Kill:
        """Wait until another worker has made progress."""
        while not await self.subject.healthy():
            await trio.sleep(0.01)
        attached = trio.current_time()
        before = (await self.subject.metrics())["generation_tokens_total"]
        while (await self.subject.metrics())["generation_tokens_total"] == before:
            await trio.sleep(0.02)
        return Kill(killed=killed, attached=attached)

    def _whole(self, record: Record) -> bool:
        wanted = self.scenario.output_tokens
        return not record.error and (record.completion_tokens, len(record.token_ids)) == (
            wanted,
            wanted,
        )

    def lost(self) -> Counter[str]:
        """Requests that failed or ended early, by why."""
        return Counter(
            record.error or f"{record.finish_reason} after {len(record.token_ids)} tokens"
            for _, record in self.records
            if not self._whole(record)
        )

    def outcomes(self) -> list[Outcome]:
        """Every answer that came, against the undisturbed one."""
        moments = [kill.killed for kill in self.kills]
        return [
            Outcome(
                request=index,
                record=record,
                kills=bisect.bisect(moments, record.chunks[-1])
                - bisect.bisect(moments, record.started),
                difference=first_difference(self.undisturbed[index].token_ids, record.token_ids),
            )
            for index, record in self.records
            if self._whole(record)
        ]

    def timed(self) -> list[Kill]:
        """The kills, each with the first token after it."""
        chunks = sorted(moment for _, record in self.records for moment in record.chunks)
        kills = []
        for kill in self.kills:
            place = bisect.bisect(chunks, kill.killed + _IN_FLIGHT)
            if place < len(chunks):
                kills.append(attrs.evolve(kill, next_token=chunks[place]))
        return kills

    def pauses_of_streams(self) -> list[float]:
        """For each stream that had begun, the time from each kill to its own next token."""
        pauses = []
        for _, record in self.records:
            for kill in self.kills:
                if record.chunks and record.chunks[0] <= kill.killed < record.chunks[-1]:
                    place = bisect.bisect(record.chunks, kill.killed + _IN_FLIGHT)
                    if place < len(record.chunks):
                        pauses.append(record.chunks[place] - kill.killed)
        return pauses


async def kills(scenario: Scenario, model: str, options: Sequence[str]) -> dict[str, Any]:
    """Run ``scenario`` on a server of ``model`` with command line ``options``; the figures."""
    requests = requests_for(scenario)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        sockets = {"TMPDIR": folder}
        async with serving(*options, model=model, environment=sockets) as subject:
            before, _ = subject.footprints()
            run = Kills(scenario=scenario, subject=subject, requests=requests)
            await run.run()
            metrics = await subject.wait_idle()
            after, _ = subject.footprints()
            outcomes = run.outcomes()
            parted = [outcome for outcome in outcomes if outcome.difference is not None]
            real = await real_differences(subject, requests, run.undisturbed, parted)
        folders = [entry.name for entry in Path(folder).iterdir()]
    timed = run.timed()
    return {
        "kills": len(run.kills),
        "worker_restarts": int(metrics["worker_restarts_total"]),
        "requests_answered": len(outcomes),
        "requests_with_kills": sum(outcome.kills > 0 for outcome in outcomes),
        "most_kills_in_one_request": max((outcome.kills for outcome in outcomes), default=0),
        "requests_lost": sum(run.lost().values()),
        "lost": dict(run.lost()),
        "tokens_compared": sum(len(outcome.record.token_ids) for outcome in outcomes),
        "answers_that_part": len(parted),
        "of_these_beyond_near_ties": len(real),
        "real_differences": [attrs.asdict(difference) for difference in real],
        "kill_to_next_token": spread([kill.next_token - kill.killed for kill in timed]),
        "of_it_until_the_model_is_loaded": spread([kill.attached - kill.killed for kill in timed]),
        "of_it_recomputing": spread([max(k.next_token - k.attached, 0.0) for k in timed]),
        "kill_to_next_token_of_each_stream": spread(run.pauses_of_streams()),
        "descriptors": {"before": before.descriptors, "after": after.descriptors},
        "folders_left": folders,
        "passed": not run.lost() and not real and not folders,
    }


def table(figures: dict[str, Any]) -> str:
    """The figures for people."""

    def times(name: str) -> str:
        spread = figures[name]
        return f"{spread['p50_ms']} · {spread['p99_ms']}"

    rows = [
        ("worker kills", figures["kills"]),
        ("requests answered", figures["requests_answered"]),
        ("… that lived through a kill", figures["requests_with_kills"]),
        ("requests lost", figures["requests_lost"]),
        ("tokens compared", figures["tokens_compared"]),
        ("answers that part from the undisturbed one", figures["answers_that_part"]),
        ("… beyond near-ties", figures["of_these_beyond_near_ties"]),
        ("kill to the next token, p50 · p99 ms", times("kill_to_next_token")),
        ("… of it a new process that loads", times("of_it_until_the_model_is_loaded")),
        ("… of it computing again", times("of_it_recomputing")),
        ("kill to each stream's next token", times("kill_to_next_token_of_each_stream")),
    ]
    return markdown(("kills", ""), rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Kill workers, print the table and save the record. 1 if anything was lost or differs."""
    parser = argparse.ArgumentParser(prog="python -m bench.faults.kills", description=__doc__)
    parser.add_argument("--model", default=MODEL, help='or "tiny", a small random one')
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--mean-interval", type=float, default=1.5, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-threads", default="1")
    given = parser.parse_args(arguments)
    scenario = Scenario(
        kills=given.kills,
        clients=given.clients,
        output_tokens=given.output_tokens,
        mean_interval=given.mean_interval,
        seed=given.seed,
    )
    # In float32, so that what rounding turns is rare; all log-probabilities, to look into it.
    options = ["--dtype", "float32", "--num-threads", given.num_threads, "--max-logprobs", "65536"]
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder)) if given.model == "tiny" else given.model
        figures = trio.run(kills, scenario, model, options)
    print(table(figures))
    path = save(RESULTS, "kills", {**vars(given), **attrs.asdict(scenario)}, figures)
    print(f"saved {path}")
    return 0 if figures["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
