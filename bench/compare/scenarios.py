"""The scenarios that a comparison measures, and the checks that make a run valid."""

from __future__ import annotations

import contextlib
import os
import shlex
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import attrs
import trio

from bench.engine.long_prompts import gaps_within
from bench.servers import Running, Server, exact_prompts, running, tokenizer
from trioserve.cli.bench_options import BenchOptions
from trioserve.cli.bench_points import points_of
from trioserve.cli.flags import bench_options
from trioserve.cli.parser import parse
from trioserve.load import Client, Conversation, CountedTexts, Record, Run, figures_of
from trioserve.load.figures import spread_of
from trioserve.load.measure import Point, measure, warm_up

# The compared beginning of two answers, and the share of answers that must agree: of two servers
# with the same model many do, of two models none.
_SAME_CHARACTERS, _SAME_ANSWERS = 12, 0.25
_LOOK_EVERY = 0.05
IDLE_SECONDS = 2.0
# An idle server uses no more than before, and so much of a core, in so many seconds.
QUIET_SECONDS, QUIET_SHARE = 1.5, 0.05
_ALL_STARTED, _ALL_DONE = 120.0, 120.0


class InvalidRun(Exception):
    """A run that didn't do the work that was to be measured."""


@attrs.frozen(kw_only=True)
class Setting:
    """A server's settings: the default model in one number format, on all cores.

    Without ``kv_tokens`` a server has the KV cache that it takes by itself or, where it doesn't
    size one, room for all ``streams`` of ``context`` tokens each.
    """

    format: str = "bf16"
    streams: int = 32
    context: int = 2048
    kv_tokens: int | None = None
    drafts: str = ""
    """Origin of draft tokens: "text", "model" (this one in 4 bits), a model's folder, or none."""

    @property
    def threads(self) -> int:
        """The number of threads that compute."""
        return len(os.sched_getaffinity(0))


@attrs.frozen(kw_only=True)
class Taken:
    """The figures of a turn, the answers in the requests' order, and the client's records."""

    values: Mapping[str, float]
    answers: Sequence[str] = ()
    run: Run | None = None


@attrs.frozen(kw_only=True)
class Turn:
    """One measurement that every server takes, one after the other: it's given one that is up.

    Turns of a scenario ``alone`` start the server themselves.
    """

    case: str
    measure: Callable[[Any], Awaitable[Taken]]


class Scenario(Protocol):
    """A scenario of servers that are up all together, or ``alone``; one at a time is busy."""

    name: str
    alone: bool

    def warm_up(self) -> list[Turn]:
        """Return the turns that come before and aren't measured."""

    def turns(self, round: int) -> list[Turn]:
        """Return a round's turns; no two rounds ask the same."""


def check(run: Run, work: Sequence[Conversation]) -> None:
    """Raise :class:`InvalidRun` unless every request was answered with exactly the work asked.

    A client that leaves and an answer in a form have no length, a prompt has one without a history.
    """
    for record in run.records:
        if record.error:
            raise InvalidRun(f"a request failed: {record.error}")
        turns = work[record.conversation].turns
        turn = turns[record.turn]
        if record.cancelled or turn.form is not None:
            continue
        if record.completion_tokens != turn.max_tokens:
            counted = record.completion_tokens
            raise InvalidRun(f"it counts {counted} tokens out, not {turn.max_tokens}")
        if len(turns) == 1 and isinstance(turn.prompt, str):
            given = CountedTexts(tokenizer()).count(turn.prompt)
            if record.prompt_tokens != given:
                raise InvalidRun(f"it counts {record.prompt_tokens} tokens in, not {given}")
        if not record.text:
            raise InvalidRun("an answer has no text")


def check_agreement(turns: Sequence[Mapping[str, Sequence[str]]], first: str) -> None:
    """Raise unless many answers of each server begin as those of the server ``first``.

    Greedy decoding of one model does, up to rounding. Answers may differ where two tokens are
    nearly as probable, so all turns of a round count together.
    """
    same: dict[str, list[bool]] = {}
    for answers in turns:
        for name, texts in answers.items():
            if name != first and first in answers:
                pairs = zip(answers[first], texts, strict=True)
                found = [a[:_SAME_CHARACTERS] == b[:_SAME_CHARACTERS] for a, b in pairs]
                same.setdefault(name, []).extend(found)
    for name, found in same.items():
        if sum(found) < _SAME_ANSWERS * len(found):
            raise InvalidRun(
                f"only {sum(found)} of {len(found)} answers begin alike on {first} and {name}"
            )


def options_of(load: str) -> BenchOptions:
    """Return a load's options of ``trioserve bench``; raise UsageError where one is wrong."""
    return bench_options(vars(parse(["bench", *shlex.split(load)])))


def points_of_load(load: str, seed: object) -> tuple[list[Point], list[Conversation]]:
    """Return the measurements of a load, and its warm-up; another ``seed`` has other prompts."""
    number = zlib.crc32(f"{load} {seed}".encode())
    options = attrs.evolve(options_of(load), seed=number)
    return points_of(options, CountedTexts(tokenizer()))


async def ask(one: Running, point: Point) -> Run:
    """Measure one point, and check its answers."""
    run = (await measure(one.target, point)).run
    check(run, point.work)
    return run


@attrs.frozen(kw_only=True)
class Loads:
    """Loads of ``trioserve bench``, as its options: each concurrency or rate is a case."""

    name: str
    loads: Sequence[str]
    alone: bool = False

    def warm_up(self) -> list[Turn]:
        """Return the requests that ``trioserve bench`` sends before it measures."""
        works = [points_of_load(load, "warm-up")[1] for load in self.loads]
        return [Turn(case="", measure=partial(_warm_up, work)) for work in works]

    def turns(self, round: int) -> list[Turn]:
        """Return each case once, with prompts of its own."""
        points = [point for load in self.loads for point in points_of_load(load, round)[0]]
        return [Turn(case=point.label, measure=partial(take, point)) for point in points]


THROUGHPUT = Loads(
    name="throughput",
    loads=[
        f"--concurrency {n} --num-prompts {2 * n} --input-tokens 128 --output-tokens 128 "
        f"--warmup {n}"
        for n in (1, 8, 32)
    ],
)
PROMPTS = Loads(
    name="prompts",
    loads=["--concurrency 4 --num-prompts 8 --input-tokens 1000 --output-tokens 16 --warmup 4"],
)
SHARED_PREFIX = Loads(
    name="shared_prefix",
    loads=[
        "--concurrency 4 --num-prompts 16 --prefix-tokens 1000 --input-tokens 32 --output-tokens 64"
    ],
)


async def _warm_up(work: Sequence[Conversation], one: Running) -> Taken:
    await warm_up(one.target, work, max(len(work), 1))
    return Taken(values={})


async def take(point: Point, one: Running) -> Taken:
    """Return the figures of a point as ``trioserve.load`` defines them."""
    run = await ask(one, point)
    figures = figures_of(run)
    values = {
        "tokens_per_second": figures.output_tokens_per_second,
        "ttft_p50_ms": figures.ttft_ms.p50,
        "ttft_p99_ms": figures.ttft_ms.p99,
        "itl_p50_ms": figures.itl_ms.p50,
        "itl_p99_ms": figures.itl_ms.p99,
        "tpot_p50_ms": figures.tpot_ms.p50,
    }
    # Later turns hold earlier answers, which part after a while.
    comparable = all(len(one.turns) == 1 and one.turns[0].cancel is None for one in point.work)
    answers = [record.text for record in run.records] if comparable else ()
    return Taken(values=values, answers=answers, run=run)


@attrs.frozen(kw_only=True)
class CpuAfterLeave:
    """The CPU that a server burns after all clients have left in the middle of their streams."""

    clients: int = 16
    events: int = 8
    prompt_tokens: int = 128
    output_tokens: int = 1000
    name: str = "cpu_after_leave"
    alone: bool = False

    def warm_up(self) -> list[Turn]:
        """Return one client that leaves: other scenarios warm the servers up."""
        return [attrs.evolve(self, clients=1)._turn("warm-up")]

    def turns(self, round: int) -> list[Turn]:
        """Return one turn with prompts of its own."""
        return [self._turn(f"round {round}")]

    def _turn(self, when: str) -> Turn:
        prompts = exact_prompts(self.clients, self.prompt_tokens, f"{self.name}, {when}")

        async def take(one: Running) -> Taken:
            before = one.family.cpu_seconds()
            await trio.sleep(IDLE_SECONDS)
            idle = (one.family.cpu_seconds() - before) / IDLE_SECONDS
            async with streaming(one, prompts, self.output_tokens, self.events):
                pass
            burnt, seconds = await _until_idle(one, idle)
            return Taken(values={"burnt_cpu_seconds": burnt, "seconds": seconds})

        return Turn(case="", measure=take)


@contextlib.asynccontextmanager
async def streaming(
    one: Running, prompts: Sequence[str], output_tokens: int, events: int
) -> AsyncIterator[list[Record]]:
    """Run a stream for each prompt, from the time that all have ``events`` to the block's end."""
    records = [Record(started=trio.current_time()) for _ in prompts]

    def late() -> list[Record]:
        return [record for record in records if len(record.chunks) < events]

    def ended() -> list[Record]:
        return [record for record in records if record.error or record.finish_reason]

    async with trio.open_nursery() as nursery:
        for prompt, record in zip(prompts, records, strict=True):
            nursery.start_soon(_complete, one, prompt, output_tokens, record)
        with trio.move_on_after(_ALL_STARTED):
            while late() and not ended():
                await trio.sleep(_LOOK_EVERY)
        if not late():
            yield records
        nursery.cancel_scope.cancel()
    if failed := ended() or late():
        why = failed[0].error or "one has ended or is late"
        raise InvalidRun(f"not all streams ran at the same time: {why}")


async def _complete(one: Running, prompt: str, output_tokens: int, record: Record) -> None:
    async with Client(one.target) as client:
        await client.ask({"prompt": prompt, "max_tokens": output_tokens}, record)


@attrs.frozen(kw_only=True)
class Burst:
    """Long prompts that come at once while streams run: their first tokens, the streams' gaps."""

    streams: int = 16
    prompt_tokens: int = 1000
    output_tokens: int = 16
    name: str = "burst"
    alone: bool = False

    def warm_up(self) -> list[Turn]:
        """Return a small burst."""
        return [attrs.evolve(self, streams=2)._turn("warm-up")]

    def turns(self, round: int) -> list[Turn]:
        """Return one turn with prompts of its own."""
        return [self._turn(f"round {round}")]

    def _turn(self, when: str) -> Turn:
        running = exact_prompts(self.streams, 128, f"{self.name}, streams, {when}")
        prompts = exact_prompts(self.streams, self.prompt_tokens, f"{self.name}, {when}")

        async def take(one: Running) -> Taken:
            async with streaming(one, running, 900, 8) as streams:
                began = trio.current_time()
                asked = [Record(started=began) for _ in prompts]
                async with trio.open_nursery() as nursery:
                    for prompt, record in zip(prompts, asked, strict=True):
                        nursery.start_soon(_complete, one, prompt, self.output_tokens, record)
            firsts = [record.chunks[0] - began for record in asked]
            times = [record.chunks for record in streams]
            gaps = spread_of(gaps_within(times, began, began + max(firsts)))
            first = spread_of(firsts)
            values = {"ttft_p50_ms": first.p50, "ttft_p99_ms": first.p99}
            return Taken(values={**values, "itl_p50_ms": gaps.p50, "itl_p99_ms": gaps.p99})

        return Turn(case="", measure=take)


async def _until_idle(one: Running, idle: float) -> tuple[float, float]:
    """Return the CPU seconds from now until the server is idle, and the seconds until then."""
    began = trio.current_time()
    samples = [(0.0, one.family.cpu_seconds())]
    while True:
        await trio.sleep(_LOOK_EVERY)
        now, used = trio.current_time() - began, one.family.cpu_seconds()
        samples.append((now, used))
        then, used_then = max(s for s in samples if s[0] <= max(now - QUIET_SECONDS, 0.0))
        quiet = (idle + QUIET_SHARE) * (now - then)
        if now >= QUIET_SECONDS and used - used_then <= quiet:
            # The use of the quiet time counts, too, as far as it is more than before.
            return max(used - samples[0][1] - idle * now, 0.0), then
        if now > _ALL_DONE:
            raise InvalidRun(f"still busy after {_ALL_DONE:g} s")


class _Alone:
    """A scenario whose turns start their server."""

    alone = True
    measure: Callable[[int, Server], Awaitable[Taken]]

    def warm_up(self) -> list[Turn]:
        """Return no turns."""
        return []

    def turns(self, round: int) -> list[Turn]:
        """Return one turn."""
        return [Turn(case="", measure=partial(self.measure, round))]


@attrs.frozen(kw_only=True)
class Memory(_Alone):
    """The PSS of all processes, with a KV cache of 16,384 tokens that requests have filled."""

    streams: int = 8
    prompt_tokens: int = 1984
    output_tokens: int = 32
    context: int = 2048
    name: str = "memory"

    def setting(self, format: str) -> Setting:
        """Return a KV cache for all streams at their full length."""
        limits = {"streams": self.streams, "context": self.context}
        return Setting(format=format, kv_tokens=self.streams * self.context, **limits)

    async def fill(self, one: Running, seed: object) -> None:
        """Fill the cache of a server."""
        load = f"--concurrency {self.streams} --num-prompts {self.streams} --warmup 0 "
        load += f"--input-tokens {self.prompt_tokens} --output-tokens {self.output_tokens}"
        await ask(one, points_of_load(load, seed)[0][0])

    async def measure(self, round: int, server: Server) -> Taken:
        """Start a server, fill its cache, and read its memory."""
        async with running(server) as one:
            before = one.family.pss_bytes()
            await self.fill(one, round)
            found = {
                "pss_mib": one.family.pss_bytes(),
                "pss_anonymous_mib": one.family.pss_bytes("Pss_Anon"),
                "pss_files_mib": one.family.pss_bytes("Pss_File"),
                "pss_at_start_mib": before,
                "pss_of_first_mib": attrs.evolve(one.family, with_children=False).pss_bytes(),
                "peak_resident_mib": one.family.peak_resident_bytes(),
            }
        return Taken(values={name: size / 2**20 for name, size in found.items()})


@attrs.frozen(kw_only=True)
class Start(_Alone):
    """The seconds from starting a server to its first token; files are cached but at first."""

    load: str = "--concurrency 1 --num-prompts 1 --input-tokens 128 --output-tokens 4 --warmup 0"
    name: str = "start"

    async def measure(self, round: int, server: Server) -> Taken:
        """Start a server and ask once."""
        (point,), _ = points_of_load(self.load, round)
        async with running(server) as one:
            (record,) = (await ask(one, point)).records
        times = {"first_token_seconds": record.chunks[0], "healthy_seconds": record.started}
        return Taken(values={name: time - one.started for name, time in times.items()})
