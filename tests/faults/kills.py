"""Workers killed under load: is anything lost, does a token differ, and how long is the pause?

``python -m tests.faults.kills``. A set of requests is answered once undisturbed. Then a closed loop
of clients asks for them again and again from the same server, while its worker is killed with
SIGKILL at random moments. Every answer has to be the undisturbed one (:mod:`tests.faults.answers`).

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

from bench.report import Made, run_script
from bench.servers import MODEL
from tests.faults.answers import Difference, first_difference, is_real
from tests.faults.load import texts
from tests.faults.stage import Subject, model_named, pair, serving, verdict_of
from trioserve.load import Client, Record, closed_loop

_IN_FLIGHT = 0.05
"""Seconds that what a worker had sent before its death may take to the client."""


@attrs.frozen(kw_only=True)
class Scenario:
    """The load and the kills; ``mean_interval`` lies between a first token and a death, in s."""

    kills: int = 100
    clients: int = 8
    requests: int = 32
    output_tokens: int = 128
    mean_interval: float = 1.5
    seed: int = 0

    def bodies(self) -> list[dict[str, Any]]:
        """Return the requests: half of them greedy, half sampled with a seed."""
        prompts = texts(random.Random(self.seed), 5, 60)
        fields = {"max_tokens": self.output_tokens, "ignore_eos": True, "return_token_ids": True}
        return [
            {
                "prompt": next(prompts),
                **fields,
                "temperature": 0.8 * (index % 2 == 0),
                "seed": index,
            }
            for index in range(self.requests)
        ]


@attrs.frozen(kw_only=True)
class Kill:
    """The times of one kill, of the next worker's attachment, and of the first token after it."""

    killed: float
    attached: float
    next_token: float = 0.0


@attrs.frozen(kw_only=True)
class Outcome:
    """One answer of the disturbed run, and the number of ``kills`` that fell into it."""

    request: int
    record: Record
    kills: int
    difference: Difference | None


@attrs.define(kw_only=True)
class Kills:
    """One run over a healthy server."""

    scenario: Scenario
    subject: Subject
    requests: list[dict[str, Any]] = attrs.field(init=False)
    undisturbed: list[Record] = attrs.field(factory=list)
    records: list[tuple[int, Record]] = attrs.field(factory=list)
    kills: list[Kill] = attrs.field(factory=list)
    _done: bool = False

    async def run(self) -> None:
        """Take the undisturbed answers, then the disturbed ones."""
        self.requests = self.scenario.bodies()
        target = self.subject.running.target
        self.undisturbed = (await closed_loop(target, self.requests, self.scenario.clients)).records
        failed = [record.error for record in self.undisturbed if not self._whole(record)]
        assert not failed, f"undisturbed requests failed: {set(failed)}"
        numbers = random.Random(self.scenario.seed + 1)
        async with trio.open_nursery() as nursery:
            for number in range(self.scenario.clients):
                nursery.start_soon(self._ask, random.Random(number))
            for _ in range(self.scenario.kills):
                await trio.sleep(numbers.expovariate(1 / self.scenario.mean_interval))
                self.kills.append(await self.disturb())
            self._done = True

    async def _ask(self, numbers: random.Random) -> None:
        async with Client(self.subject.running.target) as client:
            while not self._done:
                index = numbers.randrange(len(self.requests))
                self.records.append((index, await client.send(self.requests[index])))

    async def disturb(self) -> Kill:
        """Kill the worker, and wait until its successor has made progress."""
        with trio.fail_after(300):
            return await self.recovery(await self.kill())

    async def kill(self) -> float:
        """Kill the worker, and wait until that has been noticed; return when it was killed."""
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
        counts = {record.completion_tokens, len(record.token_ids)}
        return not record.error and counts == {self.scenario.output_tokens}

    def lost(self) -> Counter[str]:
        """Return the requests that failed or ended early, by why."""
        return Counter(
            record.error or f"{record.finish_reason} after {len(record.token_ids)} tokens"
            for _, record in self.records
            if not self._whole(record)
        )

    def outcomes(self) -> list[Outcome]:
        """Return every answer that came, against the undisturbed one."""
        moments = [kill.killed for kill in self.kills]
        found = []
        for index, record in self.records:
            if self._whole(record):
                last, first = record.chunks[-1], record.started
                kills = bisect.bisect(moments, last) - bisect.bisect(moments, first)
                parted = first_difference(self.undisturbed[index].token_ids, record.token_ids)
                found.append(Outcome(request=index, record=record, kills=kills, difference=parted))
        return found

    def timed(self) -> list[Kill]:
        """Return the kills, each with the first token after it."""
        chunks = sorted(moment for _, record in self.records for moment in record.chunks)
        places = [bisect.bisect(chunks, kill.killed + _IN_FLIGHT) for kill in self.kills]
        return [
            attrs.evolve(kill, next_token=chunks[place])
            for kill, place in zip(self.kills, places, strict=True)
            if place < len(chunks)
        ]

    def pauses_of_streams(self) -> list[float]:
        """Return, for each stream that had begun, the time from each kill to its own next token."""
        pauses = []
        for _, record in self.records:
            for kill in self.kills:
                if record.chunks and record.chunks[0] <= kill.killed < record.chunks[-1]:
                    place = bisect.bisect(record.chunks, kill.killed + _IN_FLIGHT)
                    if place < len(record.chunks):
                        pauses.append(record.chunks[place] - kill.killed)
        return pauses


async def kills(
    scenario: Scenario, model: str, options: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run ``scenario`` on a server of ``model``; return a table's figures, and further facts."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        served = serving(*options, model=model, environment={"TMPDIR": folder})
        async with served as subject:
            run = Kills(scenario=scenario, subject=subject)
            await run.run()
            await subject.wait_idle()
            outcomes = run.outcomes()
            parted = [one for one in outcomes if one.difference is not None]
            real = 0
            for one in parted:
                output = run.undisturbed[one.request].token_ids
                assert one.difference is not None
                real += await is_real(subject, run.requests[one.request], output, one.difference)
        folders = [entry.name for entry in Path(folder).iterdir()]
    timed, lost = run.timed(), run.lost()
    figures = {
        "worker kills": len(run.kills),
        "requests answered": len(outcomes),
        "… that lived through a kill": sum(one.kills > 0 for one in outcomes),
        "most kills in one request": max((one.kills for one in outcomes), default=0),
        "requests lost": sum(lost.values()),
        "tokens compared": sum(len(one.record.token_ids) for one in outcomes),
        "answers that part from the undisturbed one": len(parted),
        "… beyond near-ties": real,
        "kill to the next token, p50 · p99 ms": pair([k.next_token - k.killed for k in timed]),
        "… of it a new process that loads": pair([k.attached - k.killed for k in timed]),
        "… of it computing again": pair([max(k.next_token - k.attached, 0) for k in timed]),
        "kill to each stream's next token": pair(run.pauses_of_streams()),
    }
    passed = not lost and not real and not folders
    return figures, {"lost": dict(lost), "folders_left": folders, "passed": passed}


def measure(options: argparse.Namespace) -> Made:
    """Return the figures as a table."""
    names = ("kills", "clients", "output_tokens", "mean_interval", "seed")
    scenario = Scenario(**{name: getattr(options, name) for name in names})
    # In float32, so that what rounding turns is rare; all log-probabilities, to look into it.
    threads = str(options.num_threads)
    given = ["--dtype", "float32", "--num-threads", threads, "--max-logprobs", "65536"]
    with model_named(options.model) as model:
        figures, facts = trio.run(kills, scenario, model, given)
    return verdict_of("kills", figures, **facts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Kill workers; return 1 if anything was lost or differs."""
    return run_script(
        *("faults_kills", measure, arguments),
        **{"model": MODEL, "kills": 100, "clients": 8, "output_tokens": 128},
        **{"mean_interval": 1.5, "seed": 0, "num_threads": 1},
    )


if __name__ == "__main__":
    raise SystemExit(main())
