"""From a disconnect to the freed slot, in every stage of a request.

``python -m tests.faults.disconnects``. A request is left at a random moment of a stage: its scope
is left, or its client's socket closed. Measured is

- how long it takes until the engine has noticed, and the request is aborted;
- how long the plans still take that are in flight at that moment, which can't be called back;
- how much later the engine holds nothing of it any more: no place in the queue, no slot, no page;
- and how much later the worker has closed its slot.

Once over a fake worker, each of whose steps takes 20 ms, once over a real one, which is asked for
its slots, and answers between two steps.
"""

from __future__ import annotations

import argparse
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import attrs
import msgspec
import trio

from bench.report import Made, markdown, run_script
from bench.servers import MODEL
from tests.faults.load import texts
from tests.faults.stage import engine_over, model_named, pair, serve_here
from trioserve import Engine
from trioserve.load.figures import spread_of
from trioserve.protocol.grammar import Grammar
from trioserve.requests.request import Request, State
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import open_fake_engine

STEP_SECONDS = 0.02
_LOOK_EVERY = 0.0005
_BOUND_MS = 5.0
"""The most that a disconnect may take beside the plans in flight, at the 99th percentile."""
_BUDGET = 64
"""Tokens of a step: a long prompt takes many."""


@attrs.frozen(kw_only=True)
class Stage:
    """A stage, the ``state`` of a request in it, and the fields that bring a request there.

    It is left within so many ``seconds`` after it was reached. ``computed`` says that it has a slot
    by then, ``busy`` that another request has the only one.
    """

    name: str
    state: State
    fields: Callable[[random.Random], dict[str, Any]]
    seconds: float = 2 * STEP_SECONDS
    computed: bool = False
    busy: bool = False


def _text(words: int) -> Callable[[random.Random], dict[str, Any]]:
    return lambda numbers: {"prompt": next(texts(numbers, words, words)), "max_tokens": 400}


def _with_grammar(numbers: random.Random) -> dict[str, Any]:
    # Each is another one, so that it has to be prepared.
    words = "|".join(next(texts(numbers, 60, 60)).lower().split())
    return {**_text(4)(numbers), "regex": f"(({words}) ){{{numbers.randint(50, 10_000)}}}"}


STAGES = (
    Stage(name="tokenizing", state=State.TOKENIZING, fields=_text(2500), seconds=0.002),
    Stage(name="preparing", state=State.TOKENIZING, fields=_with_grammar, seconds=0.002),
    Stage(name="waiting", state=State.WAITING, fields=_text(20), busy=True),
    Stage(name="prefill", state=State.PREFILL, fields=_text(300), computed=True),
    Stage(name="decode", state=State.DECODE, fields=_text(4), computed=True),
)


@attrs.frozen(kw_only=True)
class Sample:
    """The seconds from a disconnect to the abort, and from there until the plans in flight were
    done, until nothing was held, and until the worker had closed the slot."""

    noticed: float
    plans: float
    freed: float
    closed: float = 0.0

    @property
    def late(self) -> float:
        """The seconds to the freed slot that no plan in flight took."""
        return self.noticed + max(self.freed - self.plans, 0.0)


@attrs.define(eq=False, kw_only=True)
class Setup:
    """An engine that is served at ``port``; ``open_slots`` asks its worker."""

    engine: Engine
    port: int
    open_slots: Callable[[], Awaitable[int]]
    numbers: random.Random = attrs.field(factory=lambda: random.Random(0))

    async def sample(self, stage: Stage, over_http: bool) -> Sample | None:
        """Leave one request in ``stage``; return None if the stage was over too soon."""
        before, leave, aborted = list(self.engine._open), trio.Event(), trio.Event()
        due, abort_time = 0, 0.0

        def note(_request: Request) -> None:
            """Note the last step in flight, while the engine ends the request."""
            nonlocal due, abort_time
            scheduler = self.engine.statistics().scheduler
            abort_time = trio.current_time()
            due = scheduler.num_steps + scheduler.plans_in_flight
            aborted.set()

        async def plans() -> bool:
            return self.engine.statistics().scheduler.num_steps >= due

        async def freed() -> bool:
            return self._freed(stage)

        async def closed() -> bool:
            return await self.open_slots() == 0

        times: dict[str, float] = {}

        async def until(name: str, done: Callable[[], Awaitable[bool]]) -> None:
            while not await done():
                await trio.sleep(_LOOK_EVERY)
            times[name] = trio.current_time() - abort_time

        async with trio.open_nursery() as nursery:
            asking = self._ask_http if over_http else self._ask
            nursery.start_soon(asking, stage.fields(self.numbers), leave)
            if not await self._reached(stage, before):
                nursery.cancel_scope.cancel()
                return None
            self.engine.on_request_end = note
            start = trio.current_time()
            leave.set()
            await aborted.wait()
            self.engine.on_request_end = lambda _: None
            for done in (freed, plans, *([closed] if stage.computed else [])):
                nursery.start_soon(until, done.__name__, done)
        return Sample(noticed=abort_time - start, **times)

    async def _reached(self, stage: Stage, before: list[Request]) -> bool:
        """Wait for the stage, and then for a random moment of it."""
        with trio.fail_after(30):
            while True:
                new = [request for request in self.engine._open if request not in before]
                if new and new[0].sequences[0].state is stage.state:
                    break
                await trio.lowlevel.checkpoint()
        await trio.sleep(self.numbers.uniform(0, stage.seconds))
        return new[0].sequences[0].state is stage.state

    def _freed(self, stage: Stage) -> bool:
        """Return whether nothing is held but by the request that has the only slot."""
        statistics = self.engine.statistics()
        scheduler = statistics.scheduler
        if stage.busy:
            return not scheduler.num_waiting and statistics.num_streams <= 1
        entered = statistics.num_streams or statistics.num_tokenizing or scheduler.num_waiting
        return not (entered or scheduler.num_running or scheduler.pages_held)

    async def _ask(self, fields: dict[str, Any], left: trio.Event) -> None:
        """Ask in a scope of this program, which is cancelled."""
        options = dict(fields)
        if regex := options.pop("regex", None):
            options["grammar"] = Grammar("regex", regex)

        async def ask() -> None:
            async with self.engine.generate(**options, ignore_eos=True) as stream:
                async for _ in stream:
                    pass

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await left.wait()
            nursery.cancel_scope.cancel()

    async def _ask_http(self, fields: dict[str, Any], left: trio.Event) -> None:
        """Ask through a socket, which is closed."""
        body = {**fields, "ignore_eos": True, "stream": True}
        if regex := body.pop("regex", None):
            body["structured_outputs"] = {"regex": regex}
        data = msgspec.json.encode(body)
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        async with await trio.open_tcp_stream("127.0.0.1", self.port) as stream:
            await stream.send_all(head.encode() + data)
            await left.wait()


@contextlib.asynccontextmanager
async def _fake(stage: Stage, depth: int) -> AsyncIterator[Setup]:
    workers: list[FakeWorker] = []

    def make_worker() -> FakeWorker:
        sizes = {"num_pages": 4096, "max_model_len": 16384, "max_num_batched_tokens": _BUDGET}
        workers.append(FakeWorker(step_time=STEP_SECONDS, call_time=0.5, **sizes))
        return workers[-1]

    async def open_slots() -> int:
        return len(workers[-1].slots)

    limits = {"max_plans_in_flight": depth, "max_num_seqs": 1 if stage.busy else 64}
    async with open_fake_engine(make_worker, **limits) as engine, serve_here(engine) as port:
        yield Setup(engine=engine, port=port, open_slots=open_slots)


@contextlib.asynccontextmanager
async def _real(model: str, stage: Stage) -> AsyncIterator[Setup]:
    options = {"max_num_batched_tokens": _BUDGET, "max_num_seqs": 1 if stage.busy else 64}
    async with engine_over(model, **options) as engine, serve_here(engine) as port:

        async def open_slots() -> int:
            return int((await engine.call_worker("statistics"))["open_slots"])

        yield Setup(engine=engine, port=port, open_slots=open_slots)


async def _samples(setup: Setup, stage: Stage, over_http: bool, count: int) -> list[Sample]:
    samples: list[Sample] = []
    missed = 0

    async def stay() -> None:
        """Have the only slot, for as long as it takes."""
        while True:
            await setup.engine.complete("hello", max_tokens=1000, ignore_eos=True)

    async with trio.open_nursery() as nursery:
        if stage.busy:
            nursery.start_soon(stay)
            while not setup.engine.statistics().scheduler.num_running:
                await trio.sleep(_LOOK_EVERY)
        while len(samples) < count:
            sample = await setup.sample(stage, over_http)
            if sample is not None:
                samples.append(sample)
            else:
                missed += 1
                if missed > 10 + 10 * count:
                    raise RuntimeError(f"{stage.name} is over too soon to leave in it")
        nursery.cancel_scope.cancel()
    return samples


async def disconnects(model: str, of_fake: int, of_real: int) -> tuple[list[list[str]], float]:
    """Return a table's lines of so many samples of each stage, and the worst p99 of lateness."""
    lines, worst = [], 0.0
    for stage in STAGES:
        setups = [
            (f"{1000 * STEP_SECONDS:g} ms, {depth} in flight", of_fake, _fake(stage, depth))
            for depth in (1, 2)
        ]
        for worker, count, opening in [*setups, ("real", of_real, _real(model, stage))]:
            async with opening as setup:
                for left_by in ("scope", "socket"):
                    samples = await _samples(setup, stage, left_by == "socket", count)
                    spans = (
                        [one.noticed for one in samples],
                        [one.plans for one in samples],
                        [max(one.freed - one.plans, 0.0) for one in samples],
                        [max(one.closed - one.plans, 0.0) for one in samples],
                    )
                    lines.append([stage.name, worker, left_by, *map(pair, spans)])
                    worst = max(worst, spread_of([one.late for one in samples]).p99)
                    print("  ".join(lines[-1]), flush=True)
    return lines, worst


def measure(options: argparse.Namespace) -> Made:
    """Return a table with a line for each stage, worker and way to leave, p50 · p99 in ms."""
    with model_named(options.model) as model:
        lines, worst = trio.run(disconnects, model, options.samples, options.real_samples)
    heads = ("stage", "worker", "left by", "noticed after", "plans in flight took")
    table = markdown((*heads, "freed past them", "worker's slot closed past them"), lines)
    passed = worst <= _BOUND_MS
    return Made(table, {"worst_p99_ms_not_in_plans": worst, "passed": passed}, int(not passed))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; return 1 if a slot is freed too late."""
    options = {"model": MODEL, "samples": 100, "real_samples": 100}
    return run_script("faults_disconnects", measure, arguments, **options)


if __name__ == "__main__":
    raise SystemExit(main())
