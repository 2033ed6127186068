"""The scenarios that a comparison measures, and the checks that make a run valid."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import attrs
import trio

from bench.servers import Running, Server, exact_prompts, running, tokenizer
from trioserve.cli.bench_options import BenchOptions
from trioserve.cli.bench_points import points_of
from trioserve.cli.flags import bench_options
from trioserve.cli.parser import parse
from trioserve.load import Client, Record, Run, closed_loop, figures_of
from trioserve.load.measure import MeasureError, Point, measure, warm_up
from trioserve.load.texts import CountedTexts
from trioserve.load.work import Conversation

# The compared beginning of two answers, and the share of answers that must agree.
_SAME_CHARACTERS, _SAME_ANSWERS = 12, 0.5
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
    """One measurement that every server takes, one after the other."""

    case: str
    measure: Callable[[Running], Awaitable[Taken]]


class Scenario(Protocol):
    """A scenario of servers that are up all together, of which one at a time is busy."""

    name: str

    def warm_up(self) -> list[Turn]:
        """Return the turns that come before and aren't measured."""

    def turns(self, round: int) -> list[Turn]:
        """Return a round's turns; no two rounds ask the same."""


class Lonely(Protocol):
    """A scenario for which servers are started one at a time."""

    name: str

    def setting(self, format: str) -> Setting:
        """Return the settings of a server."""

    async def measure(self, server: Server, log: Path, round: int) -> Taken:
        """Start the server, measure, and stop it."""


def check(name: str, run: Run, prompt_tokens: int, output_tokens: int) -> None:
    """Raise :class:`InvalidRun` unless every request was answered with exactly the work asked."""
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


def check_answers(name: str, run: Run, work: Sequence[Conversation]) -> None:
    """Check each turn's own length; a client that leaves and an answer in a form have none."""
    for record in run.records:
        if record.error:
            raise InvalidRun(f"{name}: a request failed: {record.error}")
        turn = work[record.conversation].turns[record.turn]
        if record.cancelled or turn.form is not None:
            continue
        if record.completion_tokens != turn.max_tokens:
            raise InvalidRun(
                f"{name} counts {record.completion_tokens} tokens, not {turn.max_tokens}"
            )


def check_agreement(turns: Sequence[Mapping[str, Sequence[str]]], first: str) -> None:
    """Raise unless most answers of each server begin as those of the server ``first``.

    Greedy decoding of one model does, up to rounding. One answer may differ where two tokens are
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


def taken_from(run: Run) -> Taken:
    """Return the figures of a run that comparisons show, as ``trioserve.load`` defines them."""
    figures = figures_of(run)
    values = {
        "tokens_per_second": figures.output_tokens_per_second,
        "ttft_p50_ms": figures.ttft_ms.p50,
        "ttft_p99_ms": figures.ttft_ms.p99,
        "itl_p50_ms": figures.itl_ms.p50,
        "itl_p99_ms": figures.itl_ms.p99,
        "tpot_p50_ms": figures.tpot_ms.p50,
    }
    return Taken(values=values, answers=[record.text for record in run.records], run=run)


async def ask_all(one: Running, prompts: Sequence[str], output: int, streams: int) -> Run:
    """Have ``output`` tokens generated for each prompt, ``streams`` at a time."""
    bodies = [{"prompt": prompt, "max_tokens": output} for prompt in prompts]
    return await closed_loop(one.target, bodies, streams)


@attrs.frozen(kw_only=True)
class ClosedLoop:
    """Closed loops of several widths, each of which is a case."""

    streams: Sequence[int] = (1, 8, 32)
    requests_per_stream: int = 2
    prefix_tokens: int = 0
    prompt_tokens: int = 128
    output_tokens: int = 128
    warm_up_requests: int = 1
    warm_up_tokens: int = 8
    named: bool = True
    name: str = "throughput"

    def warm_up(self) -> list[Turn]:
        """Return a few requests at each width."""
        few = (self.warm_up_requests, self.warm_up_tokens, "warm-up")
        return [self._turn(streams, *few) for streams in self.streams]

    def turns(self, round: int) -> list[Turn]:
        """Return each width once."""
        all_of_it = (self.requests_per_stream, self.output_tokens, f"round {round}")
        return [self._turn(streams, *all_of_it) for streams in self.streams]

    def _turn(self, streams: int, requests: int, output: int, when: str) -> Turn:
        seed, prefix = f"{self.name}, {streams} streams, {when}", self.prefix_tokens
        count = streams * requests
        prompts = exact_prompts(count, self.prompt_tokens, seed, prefix_tokens=prefix)

        async def take(one: Running) -> Taken:
            run = await ask_all(one, prompts, output, streams)
            check(one.server.title, run, prefix + self.prompt_tokens, output)
            return taken_from(run)

        case = f"{streams} streams" if streams > 1 else "1 stream"
        return Turn(case=case if self.named else "", measure=take)


def shared_prefix() -> ClosedLoop:
    """Return 16 requests, 4 at a time, that begin with 1,000 tokens of no other round."""
    return ClosedLoop(
        **{"streams": (4,), "requests_per_stream": 4, "prefix_tokens": 1000, "prompt_tokens": 32},
        **{"output_tokens": 64, "warm_up_tokens": 64, "named": False, "name": "shared_prefix"},
    )


@attrs.frozen(kw_only=True)
class CpuAfterLeave:
    """The CPU that a server burns after all clients have left in the middle of their streams."""

    clients: int = 16
    events: int = 8
    prompt_tokens: int = 128
    output_tokens: int = 1000
    name: str = "cpu_after_leave"

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
            await self._come_and_go(one, prompts)
            burnt, seconds = await _until_idle(one, idle)
            return Taken(values={"burnt_cpu_seconds": burnt, "seconds": seconds})

        return Turn(case="", measure=take)

    async def _come_and_go(self, one: Running, prompts: list[str]) -> None:
        records: list[Record] = []

        async def ask(prompt: str) -> None:
            records.append(Record(started=trio.current_time()))
            async with Client(one.target) as client:
                await client.ask({"prompt": prompt, "max_tokens": self.output_tokens}, records[-1])

        async with trio.open_nursery() as nursery:
            for prompt in prompts:
                nursery.start_soon(ask, prompt)
            with trio.move_on_after(_ALL_STARTED):
                while sum(len(r.chunks) >= self.events for r in records) < len(prompts):
                    await trio.sleep(_LOOK_EVERY)
                    if any(record.error or record.finish_reason for record in records):
                        break
            nursery.cancel_scope.cancel()
        late = [record for record in records if len(record.chunks) < self.events]
        if late or any(record.finish_reason for record in records):
            why = late[0].error if late else "one has ended"
            raise InvalidRun(f"{one.server.title}: not all streams ran at the same time: {why}")


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
            raise InvalidRun(f"{one.server.title}: still busy after {_ALL_DONE:g} s")


@attrs.frozen(kw_only=True)
class Memory:
    """The PSS of all processes, with a KV cache of 16,384 tokens that requests have filled."""

    streams: int = 8
    prompt_tokens: int = 1984
    output_tokens: int = 32
    context: int = 2048
    name: str = "memory"

    def setting(self, format: str) -> Setting:
        """Return a KV cache for all streams at their full length."""
        streams, context = self.streams, self.context
        tokens = streams * context
        return Setting(format=format, streams=streams, context=context, kv_tokens=tokens)

    async def fill(self, one: Running, seed: int | str) -> None:
        """Fill the cache of a server."""
        prompts = exact_prompts(self.streams, self.prompt_tokens, seed)
        run = await ask_all(one, prompts, self.output_tokens, self.streams)
        check(one.server.title, run, self.prompt_tokens, self.output_tokens)

    async def measure(self, server: Server, log: Path, round: int) -> Taken:
        """Start a server, fill its cache, and read its memory."""
        async with running(server, log) as one:
            before = one.family.pss_bytes()
            await self.fill(one, round)
            found = {
                "pss_mib": one.family.pss_bytes(),
                "pss_anonymous_mib": one.family.pss_bytes("Pss_Anon"),
                "pss_files_mib": one.family.pss_bytes("Pss_File"),
                "pss_at_start_mib": before,
                "peak_resident_mib": one.family.peak_resident_bytes(),
            }
        return Taken(values={name: size / 2**20 for name, size in found.items()})


@attrs.frozen(kw_only=True)
class Start:
    """The seconds from starting a server to its first token; files are cached but at first."""

    prompt_tokens: int = 128
    output_tokens: int = 4
    name: str = "start"

    def setting(self, format: str) -> Setting:
        """Return the settings of the other scenarios."""
        return Setting(format=format)

    async def measure(self, server: Server, log: Path, round: int) -> Taken:
        """Start a server and ask once."""
        prompts = exact_prompts(1, self.prompt_tokens, round)
        async with running(server, log) as one:
            run = await ask_all(one, prompts, self.output_tokens, 1)
        check(server.title, run, self.prompt_tokens, self.output_tokens)
        first, healthy = run.records[0].chunks[0], run.records[0].started
        seconds = {"first_token_seconds": first, "healthy_seconds": healthy}
        return Taken(values={name: at - one.started for name, at in seconds.items()})


@attrs.frozen(kw_only=True)
class Load:
    """Any load of ``trioserve bench``: each concurrency or rate is a case."""

    options: BenchOptions
    name: str = "load"

    def warm_up(self) -> list[Turn]:
        """Return the requests that ``trioserve bench`` sends before it measures."""
        before = points_of(self.options, CountedTexts(tokenizer()))[1]

        async def take(one: Running) -> Taken:
            await warm_up(one.target, before, max(len(before), 1))
            return Taken(values={})

        return [Turn(case="", measure=_valid(take))]

    def turns(self, round: int) -> list[Turn]:
        """Return each case once, with prompts of its own."""
        options = attrs.evolve(self.options, seed=self.options.seed + 97 * (round + 1))
        return [self._turn(point) for point in points_of(options, CountedTexts(tokenizer()))[0]]

    def _turn(self, point: Point) -> Turn:
        turns = [turn for one in point.work for turn in one.turns]
        # Later turns hold earlier answers, which part after a while.
        comparable = len(turns) == len(point.work) and all(turn.cancel is None for turn in turns)

        async def take(one: Running) -> Taken:
            measured = await measure(one.target, point)
            check_answers(one.server.title, measured.run, point.work)
            taken = taken_from(measured.run)
            return taken if comparable else attrs.evolve(taken, answers=())

        return Turn(case=point.label, measure=_valid(take))


def _valid(take: Callable[[Running], Awaitable[Taken]]) -> Callable[[Running], Awaitable[Taken]]:
    async def valid(one: Running) -> Taken:
        try:
            return await take(one)
        except MeasureError as error:
            raise InvalidRun(f"{one.server.title}: {error}") from error

    return valid


def load_of(words: Sequence[str]) -> Load:
    """Return the load of ``trioserve bench``'s options; raise UsageError where one is wrong."""
    return Load(options=bench_options(vars(parse(["bench", *words]))))
