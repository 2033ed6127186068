"""From a disconnect to the freed slot, in every stage of a request.

``python -m bench.faults.disconnects``. A request is left at a random moment of a stage: its scope
is left, or its client's socket closed. Measured is

- how long it takes until the engine has noticed, and the request is aborted;
- how long the plans still take that are in flight at that moment, which can't be called back;
- how much later the engine holds nothing of it any more: no place in line, no slot, no page;
- and how much later the worker has closed its slot.

Once over a fake worker, each of whose steps takes 20 ms, once over a real one, which is asked for
its slots, and answers between two steps.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import msgspec
import trio

from bench.faults.mixture import texts
from bench.faults.results import RESULTS, markdown, save, spread
from bench.faults.stage import engine_over, serve_here, tiny_model
from bench.servers import MODEL
from trioserve import Engine
from trioserve.protocol.grammar import Grammar
from trioserve.requests.request import Request, State
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import open_fake_engine

STEP_SECONDS = 0.02
_LOOK_EVERY = 0.0005
_BOUND_MS = 5.0
"""What a disconnect may take beside the plans in flight, at the 99th percentile."""
_BUDGET = 64
"""Tokens of a step: a long prompt takes many."""


@attrs.frozen(kw_only=True)
class Stage:
    """``name``, the ``states`` that a request in it may have, and what to ask to get there.

    It is left within so many ``seconds`` after it was reached. ``computed`` says that it has a slot
    by then, ``busy`` that somebody else has the only one.
    """

    name: str
    states: tuple[State, ...]
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
    Stage(name="tokenizing", states=(State.TOKENIZING,), fields=_text(2500), seconds=0.002),
    Stage(name="preparing", states=(State.TOKENIZING,), fields=_with_grammar, seconds=0.002),
    Stage(name="waiting", states=(State.WAITING,), fields=_text(20), busy=True),
    Stage(name="prefill", states=(State.PREFILL,), fields=_text(300), computed=True),
    Stage(name="decode", states=(State.DECODE,), fields=_text(4), computed=True),
)


@attrs.frozen(kw_only=True)
class Sample:
    """Seconds from a disconnect to the abort, and from there until the last of the plans was done
    that were in flight, until nothing was held, and until the worker had closed the slot."""

    noticed: float
    plans: float
    freed: float
    closed: float


@attrs.define(eq=False, kw_only=True)
class _Abort:
    """When the engine ended a request, and which step was the last one in flight then."""

    engine: Engine
    happened: trio.Event = attrs.field(factory=trio.Event)
    time: float = 0.0
    due: int = 0

    def note(self, _request: Request) -> None:
        """The engine calls this while it ends the request."""
        scheduler = self.engine.statistics().scheduler
        self.time = trio.current_time()
        self.due = scheduler.num_steps + scheduler.plans_in_flight
        self.happened.set()


@attrs.define(eq=False, kw_only=True)
class Setup:
    """An engine that is served at ``port``; ``open_slots`` asks its worker."""

    engine: Engine
    port: int
    open_slots: Callable[[], Awaitable[int]]
    numbers: random.Random

    async def sample(self, stage: Stage, over_http: bool) -> Sample | None:
        """Leave one request in ``stage``; None if the stage was over too soon."""
        before = list(self.engine._open)
        fields = stage.fields(self.numbers)
        asking = self._ask_http if over_http else self._ask
        async with trio.open_nursery() as nursery:
            leave = trio.Event()
            nursery.start_soon(asking, fields, leave)
            request = await self._reached(stage, before)
            if request is None:
                nursery.cancel_scope.cancel()
                return None
            abort = _Abort(engine=self.engine)
            self.engine.on_request_end = abort.note
            start = trio.current_time()
            leave.set()
            await abort.happened.wait()
            self.engine.on_request_end = lambda _: None
            times = await self._watch(stage, abort)
        return Sample(noticed=abort.time - start, **times)

    async def _watch(self, stage: Stage, abort: _Abort) -> dict[str, float]:
        times = {"closed": 0.0}

        async def until(name: str, done: Callable[[], Awaitable[bool]]) -> None:
            while not await done():
                await trio.sleep(_LOOK_EVERY)
            times[name] = trio.current_time() - abort.time

        async with trio.open_nursery() as nursery:
            nursery.start_soon(until, "freed", lambda: self._freed(stage))
            nursery.start_soon(until, "plans", lambda: self._acknowledged(abort.due))
            if stage.computed:
                nursery.start_soon(until, "closed", self._closed)
        return times

    async def _reached(self, stage: Stage, before: list[Request]) -> Request | None:
        """Wait for the stage, and then for a random moment of it."""
        with trio.fail_after(30):
            while True:
                new = [request for request in self.engine._open if request not in before]
                if new and new[0].sequences[0].state in stage.states:
                    break
                await trio.lowlevel.checkpoint()
        await trio.sleep(self.numbers.uniform(0, stage.seconds))
        return new[0] if new[0].sequences[0].state in stage.states else None

    async def _freed(self, stage: Stage) -> bool:
        """Whether nothing is held; who has the only seat isn't counted."""
        statistics = self.engine.statistics()
        scheduler = statistics.scheduler
        if stage.busy:
            return not scheduler.num_waiting and statistics.num_streams <= 1
        entered = statistics.num_streams or statistics.num_tokenizing or scheduler.num_waiting
        return not (entered or scheduler.num_running or scheduler.pages_held)

    async def _acknowledged(self, due: int) -> bool:
        return self.engine.statistics().scheduler.num_steps >= due

    async def _closed(self) -> bool:
        return await self.open_slots() == 0

    async def _ask(self, fields: dict[str, Any], left: trio.Event) -> None:
        """In a scope of this program, which is cancelled."""
        options = dict(fields)
        regex = options.pop("regex", None)
        if regex is not None:
            options["grammar"] = Grammar("regex", regex)
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                async with self.engine.generate(**options, ignore_eos=True) as stream:
                    async for _ in stream:
                        pass

            nursery.start_soon(ask)
            await left.wait()
            nursery.cancel_scope.cancel()

    async def _ask_http(self, fields: dict[str, Any], left: trio.Event) -> None:
        """Through a socket, which is closed."""
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
        workers.append(
            FakeWorker(
                num_pages=4096,
                max_model_len=16384,
                max_num_batched_tokens=_BUDGET,
                step_time=STEP_SECONDS,
                call_time=0.5,
            )
        )
        return workers[-1]

    async def open_slots() -> int:
        return len(workers[-1].slots)

    seats = 1 if stage.busy else 64
    opening = open_fake_engine(make_worker, max_plans_in_flight=depth, max_num_seqs=seats)
    async with opening as engine, serve_here(engine) as port:
        yield Setup(engine=engine, port=port, open_slots=open_slots, numbers=random.Random(0))


@contextlib.asynccontextmanager
async def _real(model: str, stage: Stage) -> AsyncIterator[Setup]:
    options = {"max_num_batched_tokens": _BUDGET, "max_num_seqs": 1 if stage.busy else 64}
    async with engine_over(model, **options) as engine, serve_here(engine) as port:

        async def open_slots() -> int:
            answer = await engine.call_worker("statistics")
            return int(answer["open_slots"])

        yield Setup(engine=engine, port=port, open_slots=open_slots, numbers=random.Random(0))


async def _samples(setup: Setup, stage: Stage, over_http: bool, count: int) -> list[Sample]:
    samples: list[Sample] = []
    missed = 0
    async with trio.open_nursery() as nursery:
        if stage.busy:
            nursery.start_soon(_stay, setup.engine)
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


async def _stay(engine: Engine) -> None:
    """Have the only seat, for as long as it takes."""
    while True:
        await engine.complete("hello", max_tokens=1000, ignore_eos=True)


@attrs.frozen(kw_only=True)
class Row:
    """What was measured of one stage, over one worker, in one way of leaving."""

    worker: str
    stage: str
    left_by: str
    samples: list[Sample]

    def figures(self) -> dict[str, Any]:
        """Spreads; those past the plans are of what came after the last plan in flight was done."""
        return {
            "worker": self.worker,
            "stage": self.stage,
            "left_by": self.left_by,
            "noticed": spread([sample.noticed for sample in self.samples]),
            "plans_in_flight": spread([sample.plans for sample in self.samples]),
            "freed_past_plans": spread([max(s.freed - s.plans, 0.0) for s in self.samples]),
            "worker_closed_past_plans": spread([max(s.closed - s.plans, 0) for s in self.samples]),
            "disconnect_to_freed": spread([s.noticed + s.freed for s in self.samples]),
            "of_it_not_in_plans": spread(
                [s.noticed + max(s.freed - s.plans, 0.0) for s in self.samples]
            ),
        }


async def disconnects(model: str, of_fake: int, of_real: int) -> dict[str, Any]:
    """So many samples of each stage over the fake worker, and over one of ``model``."""
    rows: list[Row] = []
    for stage in STAGES:
        setups = [
            (f"{1000 * STEP_SECONDS:g} ms, {depth} in flight", of_fake, _fake(stage, depth))
            for depth in (1, 2)
        ]
        setups.append(("real", of_real, _real(model, stage)))
        for worker, count, opening in setups:
            async with opening as setup:
                for left_by in ("scope", "socket"):
                    samples = await _samples(setup, stage, left_by == "socket", count)
                    rows.append(
                        Row(worker=worker, stage=stage.name, left_by=left_by, samples=samples)
                    )
                    print(markdown_row(rows[-1].figures()), flush=True)
    figures = [row.figures() for row in rows]
    late = max(row["of_it_not_in_plans"]["p99_ms"] for row in figures)
    return {"rows": figures, "worst_p99_not_in_plans_ms": late, "passed": late <= _BOUND_MS}


def markdown_row(row: dict[str, Any]) -> str:
    """One line of progress."""
    return "  ".join(map(str, _cells(row)))


def _cells(row: dict[str, Any]) -> list[object]:
    spreads = ("noticed", "plans_in_flight", "freed_past_plans", "worker_closed_past_plans")
    return [
        *(row["stage"], row["worker"], row["left_by"]),
        *(f"{row[name]['p50_ms']:.1f} · {row[name]['p99_ms']:.1f}" for name in spreads),
    ]


def table(figures: dict[str, Any]) -> str:
    """The figures for people, p50 · p99 in ms."""
    head = (
        *("stage", "worker", "left by", "noticed after", "plans in flight took"),
        *("freed past them", "worker's slot closed past them"),
    )
    return markdown(head, [_cells(row) for row in figures["rows"]])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and save the record. 1 if a slot is freed too late."""
    parser = argparse.ArgumentParser(prog="python -m bench.faults.disconnects", description=__doc__)
    parser.add_argument("--model", default=MODEL, help='or "tiny", a small random one')
    parser.add_argument("--samples", type=int, default=100, help="of each stage on the fake worker")
    parser.add_argument("--real-samples", type=int, default=100)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder)) if given.model == "tiny" else given.model
        figures = trio.run(disconnects, model, given.samples, given.real_samples)
    print(table(figures))
    print(f"saved {save(RESULTS, 'disconnects', vars(given), figures)}")
    return 0 if figures["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
