"""The cost of a router beside the server itself: ``python -m tests.http.router.router_cost``.

Servers with ``--mock-worker``, a router and a client are processes of their own on this machine.
Two loads that differ in their tokens alone give the processor time of a request and that of each
token, which comes as an event of its own. The client sends one request at a time for the times to
the first token, and many for the rest; what a core can do at most follows from the processor time.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import AsyncIterator, Sequence

import attrs
import msgspec
import trio

from bench.front_end.client import Load, Seen
from bench.report import Made, Rounds, in_turns, markdown, own_versions, script
from bench.servers import MODEL, Running, Server, exact_prompts, get, running
from trioserve.load.figures import spread_of

_KEY = "of-the-feeds"
_FIELDS = {"model": MODEL, "stream": True, "ignore_eos": True, "temperature": 0}
_FIELDS |= {"stream_options": {"include_usage": True}}
STEP = "4ms"
"""Time of a step: long enough that no two tokens of a stream are sent in one event."""
FEW, MANY = 2, 66
"""Tokens of an answer in both loads."""


@attrs.frozen
class Case:
    """A way to the servers: ``policy`` is that of a router before them, empty without one."""

    servers: int
    policy: str
    prompt_tokens: int

    @property
    def title(self) -> str:
        """Its name in the table."""
        if not self.policy:
            return "the server itself"
        return f"router, {self.policy}, {self.servers} server{'s'[: self.servers - 1]}"

    def __str__(self) -> str:
        return f"{self.title}, {self.prompt_tokens} tokens"


CASES = [
    *(Case(1, "", 32), Case(1, "predicted", 32), Case(2, "least_loaded", 32)),
    *(Case(2, "predicted", 32), Case(1, "", 2000), Case(2, "predicted", 2000)),
]


def _server(name: str, *command: str, **env: str) -> Server:
    every = [sys.executable, "-m", "trioserve", *command, "--log-level", "warning"]
    return Server(
        name=name,
        argv=lambda port: [*every, "--port", str(port)],
        fields=_FIELDS,
        versions=own_versions(),
        env=env,
    )


@attrs.frozen
class Place:
    """Processes that are up: the one that the client asks, the router if any, the servers."""

    front: Running
    router: Running | None
    servers: list[Running]

    def cpu(self) -> tuple[float, float]:
        """Return the processor seconds of the router and of the servers."""
        own = self.router.family.cpu_seconds() if self.router else 0.0
        return own, sum(each.family.cpu_seconds() for each in self.servers)


@contextlib.asynccontextmanager
async def opened(case: Case, step: str) -> AsyncIterator[Place]:
    """Start the servers, and the router before them, for the block."""
    async with contextlib.AsyncExitStack() as stack:
        command = ["serve", MODEL, "--mock-worker", step]
        server = _server("trioserve", *command, TRIOSERVE_ADMIN_API_KEY=_KEY)
        servers = [await stack.enter_async_context(running(server)) for _ in range(case.servers)]
        if not case.policy:
            yield Place(servers[0], None, servers)
            return
        urls = [f"http://127.0.0.1:{each.port}" for each in servers]
        more = ["--routing-policy", case.policy]
        route = _server("router", "route", *urls, *more, TRIOSERVE_UPSTREAM_ADMIN_API_KEY=_KEY)
        router = await stack.enter_async_context(running(route))
        while not all(
            each["up"] for each in json.loads((await get(router.port, "/health"))[1])["servers"]
        ):
            await trio.sleep(0.05)
        yield Place(router, router, servers)


_seeds = itertools.count()


async def ask(place: Place, case: Case, streams: int, requests: int, tokens: int) -> Seen:
    """Send requests with prompts that no cache has, and return what the client has seen."""
    prompts = exact_prompts(requests, case.prompt_tokens, next(_seeds))
    bodies = [json.dumps({**_FIELDS, "max_tokens": tokens, "prompt": each}) for each in prompts]
    work = Load(
        **{"host": "127.0.0.1", "port": place.front.port, "path": "/v1/completions"},
        **{"streams": streams, "bodies": bodies, "cores": []},
    )
    command, given = [sys.executable, "-m", "bench.front_end.client"], msgspec.json.encode(work)
    client = await trio.run_process(command, stdin=given, capture_stdout=True)
    seen = msgspec.json.decode(client.stdout, type=Seen)
    assert seen.tokens == requests * tokens
    return seen


async def costs(case: Case, streams: int, requests: int) -> dict[str, float]:
    """Return a case's figures: µs of processor time, ms to the first token."""
    found: dict[str, float] = {}
    async with opened(case, STEP) as place:
        await ask(place, case, streams, streams, FEW)
        used: dict[int, tuple[float, float]] = {}
        for tokens in (FEW, MANY):
            before = place.cpu()
            seen = await ask(place, case, streams, requests, tokens)
            after = place.cpu()
            used[tokens] = tuple(
                1e6 * (b - a) / requests for a, b in zip(before, after, strict=True)
            )
            found["joined"] = seen.tokens / seen.events
        for name, few, many in zip(("router", "servers"), used[FEW], used[MANY], strict=True):
            token = (many - few) / (MANY - FEW)
            found |= {f"{name}_token": token, f"{name}_request": few - FEW * token}
    async with opened(case, "0") as place:
        await ask(place, case, 1, 20, FEW)
        seen = await ask(place, case, 1, requests // 4, FEW)
        found["ttft"] = spread_of(seen.ttft).p50
        seen = await ask(place, case, streams, requests, 1)
        found["rate"] = seen.requests / seen.duration
    return found


_HEADS = [
    *("", "prompt", "router: µs a request", "µs a token", "a core's most: requests/s"),
    *("servers: µs a request", "µs a token", "TTFT p50 ms", "all on these cores: requests/s"),
]


@script
async def measure(*, streams: int = 32, requests: int = 600, rounds: int = 2) -> Made:
    """Return a row for each case, the medians of some rounds."""
    found = Rounds()
    for _, case in in_turns(rounds, CASES):
        few = requests if case.prompt_tokens < 1000 else requests // 4
        found.add(case, **await costs(case, streams, few))
    lines: list[Sequence[object]] = []
    for case, of in found.medians().items():
        shown = ["", "", ""]
        if case.policy:
            shown = [f"{of['router_request']:.0f}", f"{of['router_token']:.1f}"]
            shown.append(f"{1e6 / of['router_request']:,.0f}")
        theirs = [f"{of['servers_request']:.0f}", f"{of['servers_token']:.1f}"]
        last = [f"{of['ttft']:.2f}", f"{of['rate']:.0f}"]
        lines.append([case.title, f"{case.prompt_tokens:,} tokens", *shown, *theirs, *last])
    joined = max(of["joined"] for of in found.medians().values())
    facts = {"versions": {"trioserve": own_versions("httpcore2")}, "tokens_per_event": joined}
    return Made(markdown(_HEADS, lines), facts)
