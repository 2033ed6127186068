"""The cost of one engine with many workers: ``python -m tests.engine.routing.many_workers``.

Engine, schedulers, router, detokenizer and streams are the real ones, in virtual time: a thousand
workers that compute nothing run on one core, so many times slower as the engine would need cores.
Each worker has ``--streams`` streams that a closed loop keeps full, and a step takes ``--step-ms``.
The processor time of the fake workers themselves isn't counted.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import attrs
import trio
import trio.testing

from bench.report import Made, markdown, script
from tests.engine.routing.scaling import PROMPT_TOKENS, ask_on
from trioserve import Engine
from trioserve.protocol import wire
from trioserve.protocol.gc_tuning import rare_collections
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import open_fake_engine

OUTPUT_TOKENS = 250
_WARM_UP = 1.0


@attrs.define
class _Spent:
    """Processor time of fake workers, in nanoseconds."""

    ns: int = 0


@attrs.define(eq=False, kw_only=True)
class _TimedWorker(FakeWorker):
    """A fake worker that adds its processor time to ``spent``."""

    spent: _Spent

    def step(self, plan: wire.Plan) -> wire.StepResult | wire.Failure:
        began = time.process_time_ns()
        try:
            return super().step(plan)
        finally:
            self.spent.ns += time.process_time_ns() - began


@attrs.frozen(kw_only=True)
class _Counts:
    """Counts of an engine, and the processor seconds of all but its workers."""

    tokens: int
    steps: int
    requests: int
    cpu: float

    @classmethod
    def of(cls, engine: Engine, spent: _Spent) -> _Counts:
        scheduler = engine.statistics().scheduler
        return cls(
            tokens=scheduler.num_tokens_sampled,
            steps=scheduler.num_steps,
            requests=scheduler.prefix_cache_queries // PROMPT_TOKENS,
            cpu=time.process_time() - spent.ns / 1e9,
        )


async def figures_of(
    workers: int, streams: int, step: float, seconds: float, settled: Callable[[], None]
) -> dict[str, float]:
    """Return the figures of one number of workers, for a second of the clock.

    ``settled`` is called once all long-lived objects are there.
    """
    spent = _Spent()
    make = functools.partial(
        _TimedWorker,
        spent=spent,
        step_time=step,
        token=lambda context, _: context[-1] * 5 + 7 & 255,
        num_pages=streams * 32,
        max_num_seqs=streams,
    )
    queue = {"max_num_queued_reqs": workers * streams, "max_num_queued_tokens": None}
    async with (
        open_fake_engine(make, data_parallel_size=workers, **queue) as engine,
        trio.open_nursery() as nursery,
    ):
        for number in range(workers * streams):
            nursery.start_soon(ask_on, engine, number, OUTPUT_TOKENS, range(256))
        await trio.sleep(_WARM_UP)
        settled()
        before = _Counts.of(engine, spent)
        await trio.sleep(seconds)
        after = _Counts.of(engine, spent)
        nursery.cancel_scope.cancel()
    return {
        name: (getattr(after, name) - getattr(before, name)) / seconds
        for name in ("tokens", "steps", "requests", "cpu")
    }


@script
def measure(
    workers: Sequence[int] = (1, 8, 64, 1000),
    streams: int = 16,
    step_ms: float = 25.0,
    seconds: float = 1.0,
) -> Made:
    """Return a line for each number of workers."""
    lines = []
    for number in workers:
        clock = trio.testing.MockClock(autojump_threshold=0)
        sizes = number, streams, step_ms / 1000, seconds
        with rare_collections() as settled:  # as in the process of `trioserve serve`
            found = trio.run(figures_of, *sizes, settled, clock=clock)
        cpu = found["cpu"]
        lines.append([
            number, f"{found['requests']:,.0f}", f"{2 * found['steps']:,.0f}",
            f"{found['tokens']:,.0f}", f"{cpu:.2f}", f"{1e6 * cpu / found['steps']:.0f}",
            f"{1e6 * cpu / found['tokens']:.1f}",
        ])  # fmt: skip
    heads = ["workers", "requests/s", "messages/s", "tokens/s", "cores of the engine"]
    return Made(markdown([*heads, "CPU µs per step", "CPU µs per token"], lines), {})
