"""Pages that are lent: the plan that a worker has to have computed before it writes them."""

from __future__ import annotations

from tests.support.scheduling import Bench, worker
from trioserve.protocol import wire
from trioserve.scheduler.fetched_pages import NO_PLAN
from trioserve.scheduler.prefix_tree import Namespace

PROMPT = list(range(20, 33))
NAMESPACE: Namespace = ("",)


def plan_of(bench: Bench) -> int:
    """Return the plan that lent pages of the prompt wait for."""
    memory = bench.core.memory
    match = memory.prefix.match(NAMESPACE, wire.from_ints(PROMPT), NO_PLAN)
    assert len(match.nodes) == 3
    lent = memory.lending.begin(match.nodes)
    assert len(lent.pages) == 3
    memory.lending.end(lent)
    return lent.plan


def test_pages_wait_for_the_plan_that_computes_them() -> None:
    bench = Bench.make(worker(), max_plans_in_flight=2)
    bench.submit(PROMPT, max_tokens=2)
    bench.plan()
    first = bench.plans[-1].number
    assert plan_of(bench) == first
    bench.plan()
    assert plan_of(bench) == first
    bench.drain()


def test_pages_wait_for_the_plan_that_copies_them_to_the_host() -> None:
    """Another worker may ask for them before that plan, a later one, is computed."""
    bench = Bench.make(worker(num_pages=8, num_host_pages=8), max_plans_in_flight=2)
    bench.submit(PROMPT, max_tokens=2)
    bench.drain()
    computed = plan_of(bench)
    bench.submit([9] * 24, max_tokens=6)
    bench.plan()
    copying = bench.plans[-1]
    assert len(copying.copies)
    assert plan_of(bench) == copying.number > computed
    bench.drain()
    assert plan_of(bench) <= computed  # It is done.
