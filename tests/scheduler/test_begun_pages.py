"""Virtual tokens that end within a page are computed once: the page is copied for each prompt."""

from __future__ import annotations

import pytest

from tests.support.scheduling import Bench, make_request, reference, worker
from trioserve.protocol import wire
from trioserve.requests.request import Sequence


def submit(bench: Bench, virtual: int, *rest: int) -> Sequence:
    """Submit a prompt of ``rest`` behind ``virtual`` tokens, which are equal in all prompts."""
    request = make_request([*range(virtual), *rest], max_tokens=6)
    request.num_virtual_tokens = virtual
    bench.core.submit(request, bench.now)
    return request.sequences[0]


@pytest.mark.parametrize("virtual", [3, 6])
def test_a_page_of_another_prompt_is_copied(virtual: int) -> None:
    fake = worker()
    bench = Bench.make(fake)
    first = submit(bench, virtual, 20, 21, 22)
    bench.drain()
    others = [submit(bench, virtual, 30 + each, 31, 32) for each in range(3)]
    same = submit(bench, virtual, 20, 21, 22, 40, 41)
    plain = bench.submit([*range(virtual), 50, 51], max_tokens=6)
    bench.drain()
    assert first.request.num_cached_tokens == 0
    assert [each.request.num_cached_tokens for each in others] == [virtual] * 3
    assert same.request.num_cached_tokens == (virtual + 3) // 4 * 4
    assert plain.request.num_cached_tokens == virtual // 4 * 4, "it has no virtual tokens"
    copies = [wire.ints(plan.copies).reshape(-1, 2) for plan in bench.plans]
    assert sum(map(len, copies)) == 3
    for each in (first, *others, same, plain):
        assert each.output_ids == reference(fake, each)


def test_a_page_of_a_plan_in_flight_is_not_copied() -> None:
    """The rows that compute it may still be dropped."""
    bench = Bench.make(worker(max_num_batched_tokens=8), max_plans_in_flight=2)
    first = submit(bench, 6, 20, 21)
    bench.plan()
    second = submit(bench, 6, 30, 31)
    bench.plan()
    assert second.request.num_cached_tokens == 4
    bench.drain()
    third = submit(bench, 6, 40, 41)
    bench.drain()
    assert third.request.num_cached_tokens == 6
    for each in (first, second, third):
        assert each.output_ids == reference(bench.worker, each)


def test_virtual_tokens_whose_pages_are_gone_are_computed() -> None:
    bench = Bench.make(worker(num_pages=8))
    submit(bench, 6, *range(20, 26))
    bench.drain()
    filler = bench.submit([9] * 24, max_tokens=6)
    bench.drain()
    assert filler.output_ids
    again = submit(bench, 6, *range(30, 36))
    bench.drain()
    assert again.request.num_cached_tokens == 0
    assert again.output_ids == reference(bench.worker, again)
