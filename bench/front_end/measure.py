"""One server at one width: the shortest step at which every token has an event of its own."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import attrs
import msgspec
import trio

from bench.front_end.client import Load, Seen
from bench.front_end.contenders import At
from bench.prompts import exact_prompts, tokenizer
from bench.servers import Running

__all__ = [
    "ENGINE",
    "FRONT_END",
    "MOST_TOKENS_PER_EVENT",
    "WORKER",
    "InvalidRun",
    "Measured",
    "Workload",
    "fastest",
    "once",
]

MOST_TOKENS_PER_EVENT = 1.05
"""A server that is behind sends several tokens in one event. More than this isn't a valid run."""

ENGINE, FRONT_END, WORKER = "engine", "front end", "worker"
"""What a process of the server is; front ends are numbered."""

_SLOWER = 1.3
_MOST_STEPS = 12


class InvalidRun(Exception):
    """A server failed, or can't send every token by itself at any pace that was tried."""


@attrs.frozen(kw_only=True)
class Workload:
    """What is asked of a server, over so many streams at a time."""

    streams: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    client_cores: list[int]
    front_ends: int = 1
    seed: int = 0

    def bodies(self, fields: Any) -> list[str]:
        """The requests' bodies; no two prompts are the same."""
        prompts = exact_prompts(tokenizer(), self.requests, self.prompt_tokens, self.seed)
        more = {**fields, "max_tokens": self.output_tokens, "stream": True}
        return [json.dumps({**more, "prompt": prompt}) for prompt in prompts]


@attrs.frozen(kw_only=True)
class Measured:
    """One run. Times are milliseconds, processor time microseconds for each token of output."""

    server: str
    round: int
    streams: int
    step_ms: float
    requests: int
    tokens: int
    seconds: float
    tokens_per_second: float
    requests_per_second: float
    tokens_per_event: float
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    gap_p50_ms: float
    gap_p99_ms: float
    server_us_per_token: float
    """Of all its processes together."""
    client_core_used: float
    """1 is all of it: then the client is what was measured."""
    front_ends: int = 1
    us_by_process: dict[str, float] = attrs.field(factory=dict)
    """What each process took, by what it is; none of it is a rate that was measured."""

    @property
    def bound(self) -> float:
        """Tokens per second at which the busiest process would have a whole core to do.

        What a machine with a core for each process could reach at most. A worker isn't counted: in
        its place is what a model takes.
        """
        busiest = max(
            (used for name, used in self.us_by_process.items() if name != WORKER),
            default=self.server_us_per_token,
        )
        return 1e6 / busiest


async def fastest(name: str, round: int, at: At, load: Workload, probe: Workload) -> Measured:
    """The run of ``load`` with the shortest step time at which no events are joined.

    Step times are tried with ``probe``, from none on, and then from what a step costs the server.

    Raises:
        InvalidRun: there is none, or the server failed.
    """
    step = 0.0
    for _ in range(_MOST_STEPS):
        async with at(step) as up:
            tried = await once(name, round, up, step, probe)
            if tried.tokens_per_event <= MOST_TOKENS_PER_EVENT:
                measured = await once(name, round, up, step, load)
                if measured.tokens_per_event <= MOST_TOKENS_PER_EVENT:
                    return measured
        step = step * _SLOWER or load.streams * tried.server_us_per_token / 1e6
    raise InvalidRun(f"{name} joins events at {load.streams} streams even at {step * 1e3:.0f} ms")


async def once(name: str, round: int, up: Running, step: float, load: Workload) -> Measured:
    """Run ``load`` once against a server that is up.

    Raises:
        InvalidRun: an answer wasn't whole.
    """
    description = Load(
        host="127.0.0.1",
        port=up.port,
        path=up.server.path,
        streams=load.streams,
        bodies=load.bodies(up.server.fields),
        cores=load.client_cores,
    )
    before, before_by_process = up.family.cpu_seconds(), _by_process(up)
    client = await trio.run_process(
        [sys.executable, "-m", "bench.front_end.client"],
        stdin=msgspec.json.encode(description),
        capture_stdout=True,
        capture_stderr=True,
        check=False,
    )
    used = up.family.cpu_seconds() - before
    used_by_process = {
        name: seconds - before_by_process.get(name, 0.0)
        for name, seconds in _by_process(up).items()
    }
    if client.returncode:
        raise InvalidRun(f"{name}: {client.stderr.decode()[-1000:]}")
    seen = msgspec.json.decode(client.stdout, type=Seen)
    if (seen.requests, seen.tokens) != (load.requests, load.requests * load.output_tokens):
        raise InvalidRun(f"{name} gave {seen.tokens} tokens in {seen.requests} answers")
    ttft, gaps = sorted(seen.ttft), sorted(seen.gaps)
    return Measured(
        server=name,
        round=round,
        streams=load.streams,
        step_ms=step * 1e3,
        requests=seen.requests,
        tokens=seen.tokens,
        seconds=seen.duration,
        tokens_per_second=seen.tokens / seen.duration,
        requests_per_second=seen.requests / seen.duration,
        tokens_per_event=seen.tokens / seen.events,
        ttft_mean_ms=statistics.fmean(ttft) * 1e3,
        ttft_p50_ms=_at(ttft, 0.5) * 1e3,
        ttft_p99_ms=_at(ttft, 0.99) * 1e3,
        gap_p50_ms=_at(gaps, 0.5) * 1e3,
        gap_p99_ms=_at(gaps, 0.99) * 1e3,
        server_us_per_token=used / seen.tokens * 1e6,
        client_core_used=seen.cpu_seconds / seen.duration,
        front_ends=load.front_ends,
        us_by_process={
            name: seconds / seen.tokens * 1e6 for name, seconds in used_by_process.items()
        },
    )


def _by_process(up: Running) -> dict[str, float]:
    """Seconds of CPU of each process of this project's server, by what it is; none of others'."""
    if up.server.name != "trioserve":
        return {}
    used: dict[str, float] = {}
    for command, seconds in up.family.cpu_by_command():
        if "trioserve.front_ends" in command:
            name = f"{FRONT_END} {sum(each.startswith(FRONT_END) for each in used)}"
        else:
            name = WORKER if " -m gpu " in command else ENGINE
        used[name] = seconds
    return used


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0
