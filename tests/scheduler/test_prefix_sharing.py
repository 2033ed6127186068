"""One prefix, many requests: it is computed once, no request waits in vain, and the cost is
bounded.
"""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.scheduling import ABORT, Bench, reference, worker
from trioserve.protocol import wire
from trioserve.requests.request import Sequence, State
from trioserve.scheduler.prefix_cache import PrefixCache
from trioserve.scheduler.prompt_planning import WINDOW
from trioserve.testing import hashed_token

PAGE = 16
PREFIX = 1000
FULL = PREFIX // PAGE * PAGE
"""Tokens of the prefix that stand in full pages, which can be shared."""
QUESTION = 20
ANSWER = 8
NUM_REQUESTS = 16
AT_A_TIME = 4

POLICIES = ("fcfs", "lpm", "priority")
CAPACITIES = ("max_utilization", "guaranteed_no_evict")


def make_bench(*, budget: int = 512, num_pages: int = 512, **limits: Any) -> Bench:
    fake = worker(
        num_pages=num_pages,
        page_size=PAGE,
        max_num_batched_tokens=budget,
        token=hashed_token(256),
    )
    return Bench.make(fake, **limits)


def prompts(number: int) -> list[list[int]]:
    """Return ``number`` prompts with the same first ``PREFIX`` tokens."""
    rng = random.Random(0)
    prefix = [rng.randrange(256) for _ in range(PREFIX)]
    return [[*prefix, *(rng.randrange(256) for _ in range(QUESTION))] for _ in range(number)]


def serve(bench: Bench, line: list[list[int]], at_a_time: int) -> list[Sequence]:
    """Run a closed loop: the next prompt comes when one of ``at_a_time`` has its answer."""
    served: list[Sequence] = []
    while len(served) < len(line) or any(each.state is not State.FINISHED for each in served):
        busy = sum(each.state is not State.FINISHED for each in served)
        for prompt in line[len(served) :][: at_a_time - busy]:
            served.append(bench.submit(prompt, max_tokens=ANSWER))
        bench.step()
    bench.drain()
    return served


def computed_for_prompts(bench: Bench) -> int:
    """Without the tokens of answers, of which all but the last are computed, too."""
    decoded = bench.core.counters.num_tokens_sampled - len({id(o.sequence) for o in bench.outputs})
    return bench.core.counters.num_tokens_computed - decoded


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [64, 300, 512, 2048])
def test_sixteen_requests_compute_their_prefix_once(
    budget: int, depth: int, capacity: str, policy: str
) -> None:
    bench = make_bench(
        budget=budget,
        max_plans_in_flight=depth,
        capacity_policy=capacity,
        scheduling_policy=policy,
    )
    served = serve(bench, prompts(NUM_REQUESTS), AT_A_TIME)
    own = PREFIX - FULL + QUESTION
    assert computed_for_prompts(bench) == FULL + NUM_REQUESTS * own
    assert [each.request.num_cached_tokens for each in served] == [0, *[FULL] * 15]
    for sequence in served:
        assert sequence.output_ids == reference(bench.worker, sequence)


def test_all_at_once_they_wait_for_one_and_then_come_together() -> None:
    bench = make_bench()
    sequences = [bench.submit(prompt, max_tokens=ANSWER) for prompt in prompts(6)]
    bench.plan()
    bench.result()
    bench.plan()
    assert [each.state for each in sequences] == [State.DECODE, *[State.WAITING] * 5]
    bench.result()
    bench.plan()
    assert [each.state for each in sequences] == [State.DECODE] * 6
    bench.drain()


@pytest.mark.parametrize("caching", [True, False])
def test_the_salt_and_the_switch_keep_them_apart(caching: bool) -> None:
    bench = make_bench(enable_prefix_caching=caching)
    for number, prompt in enumerate(prompts(3)):
        bench.submit(prompt, max_tokens=ANSWER, salt=str(number))
    bench.drain()
    assert computed_for_prompts(bench) == 3 * (PREFIX + QUESTION)


@pytest.mark.parametrize("num_plans", [0, 1, 2, 3])
@pytest.mark.parametrize("depth", [1, 2])
def test_who_computes_the_prefix_may_leave(depth: int, num_plans: int) -> None:
    """Use what it had computed; one of the others goes on from there."""
    bench = make_bench(max_plans_in_flight=depth)
    leader, *others = (bench.submit(prompt, max_tokens=ANSWER) for prompt in prompts(5))
    for _ in range(num_plans):
        bench.step()
    bench.core.abort(leader, ABORT)
    bench.drain()
    for sequence in others:
        assert sequence.output_ids == reference(bench.worker, sequence)
    own = PREFIX - FULL + QUESTION
    cached = others[0].request.num_cached_tokens
    assert cached % PAGE == 0
    assert (cached > 0) == (num_plans > 0)
    assert [each.request.num_cached_tokens for each in others[1:]] == [FULL] * 3
    # The rest of the leaving prompt and what was in flight may have been computed in vain.
    assert computed_for_prompts(bench) <= FULL + 5 * own + depth


def test_who_computes_the_prefix_may_be_preempted() -> None:
    """Decode it before it is preempted; the sequences behind it match what it had computed."""
    bench = make_bench(num_pages=75)
    first = bench.submit(prompts(1)[0], max_tokens=160)
    while first.state is not State.DECODE:
        bench.step()
    others = [bench.submit(prompt, max_tokens=100) for prompt in prompts(4)[1:]]
    bench.drain()
    assert bench.core.counters.num_preemptions > 0
    for sequence in (first, *others):
        assert sequence.output_ids == reference(bench.worker, sequence)


def test_a_prefix_is_computed_again_where_the_worker_with_it_was_lost() -> None:
    bench = make_bench()
    sequences = [bench.submit(prompt, max_tokens=ANSWER) for prompt in prompts(4)]
    bench.step()
    bench.core.recovery.on_worker_lost()
    bench.results.clear()
    bench.worker.reset(wire.Reset(next_plan=1))
    assert bench.core.recovery.restart(bench.core.limits) == []
    before = bench.core.counters.num_tokens_computed
    bench.drain()
    for sequence in sequences:
        assert sequence.output_ids == reference(bench.worker, sequence)
    own = PREFIX - FULL + QUESTION
    assert bench.core.counters.num_tokens_computed - before == FULL + 4 * (own + ANSWER - 1)


def test_nobody_waits_for_one_who_takes_no_hits() -> None:
    """Compute cached tokens again for a request that wants the log-probabilities of its prompt."""
    bench = make_bench()
    first, second = prompts(2)
    bench.submit(first, max_tokens=1)
    bench.drain()
    scoring = bench.submit(first, max_tokens=1, prompt_logprobs=0)
    bench.step()
    asking = bench.submit(second, max_tokens=1)
    bench.drain()
    assert scoring.request.num_cached_tokens == 0
    assert asking.request.num_cached_tokens == FULL


tokens = st.lists(st.integers(0, 2), min_size=0, max_size=20)


@given(
    branches=st.lists(tokens, min_size=1, max_size=3),
    arrivals=st.lists(
        st.tuples(
            st.integers(0, 2),
            st.integers(0, 20),
            st.integers(1, 50),
            st.sampled_from([1, 1, 1, 3]),
            st.integers(0, 2),
            st.integers(0, 3),
        ),
        min_size=2,
        max_size=16,
    ),
    page_size=st.integers(1, 4),
    budget=st.sampled_from([4, 7, 16, 64]),
    seats=st.sampled_from([1, 3, 16]),
    depth=st.integers(1, 3),
    policy=st.sampled_from(POLICIES),
    capacity=st.sampled_from(CAPACITIES),
)
@settings(max_examples=150, deadline=None)
def test_with_room_for_all_every_page_is_computed_once(
    branches: list[list[int]],
    arrivals: list[tuple[int, int, int, int, int, int]],
    page_size: int,
    budget: int,
    seats: int,
    depth: int,
    policy: str,
    capacity: str,
) -> None:
    """Publish the full pages of all prompts, in any order of arrival.

    A prompt that ends with a page computes that page again, for the logits of its last token; a
    longer one finds it then, if it comes later.
    """
    bench = Bench.make(
        worker(
            num_pages=2000,
            page_size=page_size,
            max_num_seqs=seats,
            max_num_batched_tokens=budget,
            token=lambda context, _: 100 + len(context) % 100,
        ),
        max_plans_in_flight=depth,
        scheduling_policy=policy,
        capacity_policy=capacity,
    )
    pages: set[tuple[int, ...]] = set()
    prompts_seen: list[list[int]] = []
    expected = 0
    for branch, length, question, n, priority, steps in arrivals:
        prompt = [*branches[branch % len(branches)][:length], *[question] * 3]
        bench.submit_all(prompt, max_tokens=2, n=n, priority=priority)
        prompts_seen.append(prompt)
        full = (len(prompt) - 1) // page_size
        pages.update(tuple(prompt[: (k + 1) * page_size]) for k in range(full))
        expected += n * (len(prompt) - full * page_size)
        for _ in range(steps):
            bench.step()
    bench.drain()
    ends = {tuple(prompt) for prompt in prompts_seen if len(prompt) % page_size == 0}
    most = expected + len(pages) * page_size
    assert most - len(ends & pages) * page_size <= computed_for_prompts(bench) <= most


@pytest.mark.parametrize("policy", POLICIES)
def test_a_plan_costs_no_more_walks_of_the_tree_where_more_wait(policy: str) -> None:
    """Walk the tree for a bounded number of sequences that share a prefix being computed."""

    def walks(num_waiting: int) -> int:
        bench = make_bench(budget=2048, scheduling_policy=policy)
        for prompt in prompts(num_waiting):
            bench.submit(prompt, max_tokens=ANSWER)
        match = PrefixCache.match
        with mock.patch.object(PrefixCache, "match", autospec=True, side_effect=match) as spy:
            bench.core.next_plan(0.0)
        return spy.call_count

    assert walks(1000) == walks(200) <= 150
    if policy != "lpm":
        assert walks(1000) <= WINDOW + 10


def test_mixed_prefixes_all_end() -> None:
    bench = make_bench(budget=128, max_plans_in_flight=2, num_pages=160)
    rng = random.Random(1)
    families = [[rng.randrange(256) for _ in range(600)] for _ in range(3)]
    served = []
    for number in range(30):
        prompt = [*families[number % 3][: rng.randrange(600)], number]
        served.append(bench.submit(prompt, max_tokens=5))
        bench.step()
        if rng.random() < 0.2:
            bench.core.abort(rng.choice(served), ABORT)
    bench.drain()
    for sequence in served:
        expected = reference(bench.worker, sequence)
        assert sequence.output_ids == expected[: len(sequence.output_ids)]
        assert sequence.state is State.FINISHED
