"""The choice of a worker: by predicted times, and by the simpler policies."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import attrs
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

from tests.engine.routing.reference import Given, predicted_cost, predicted_ttft
from trioserve.engine.routing.policy import OUTPUT_TOKENS, KnownPrefix, Loads, Policy, WorkerLoad
from trioserve.scheduler.step_time import StepLoad, StepTimeModel

FIXED, DECODE, TOKEN, CONTEXT = 0.008, 0.0002, 0.0001, 1e-8


def model(speed: float = 1.0) -> StepTimeModel:
    """Return a model that has learned the times of a machine."""
    made = StepTimeModel()
    for decodes, prompt, context in itertools.product((0, 4, 32), (0, 64, 512), (1000, 20_000)):
        load = StepLoad(decodes=decodes, prompt_tokens=prompt, context=context)
        seconds = FIXED + decodes * DECODE + prompt * TOKEN + context * CONTEXT
        made.observe(load, seconds / speed)
    return made


KNOWN = model()


SLOW = model(speed=0.5)


def load(cached: int = 0, on_host: int = 0, loading: float = 0.0, **fields: object) -> Given:
    """Return a worker of which something is known."""
    given = WorkerLoad(**{"model": KNOWN, **fields})  # type: ignore[arg-type]
    return Given(load=given, cached=cached, on_host=on_host, loading=loading)


def prefix_of(given: Sequence[Given]) -> KnownPrefix:
    return KnownPrefix(
        cached=np.array([float(each.cached) for each in given]),
        on_host=np.array([float(each.on_host) for each in given]),
        loading=np.array([each.loading for each in given]),
    )


def choose(policy: Policy, given: Sequence[Given], prompt: int) -> int:
    return policy.choose(Loads.of([each.load for each in given]), prompt, prefix_of(given))


def cost(given: Given, prompt: int) -> float:
    return float(Loads.of([given.load]).costs(prompt, prefix_of([given]))[0])


def test_an_idle_worker_takes_the_time_of_the_prompt() -> None:
    streams = OUTPUT_TOKENS * (FIXED + DECODE + 2000 * CONTEXT)
    alone = FIXED + 2 * 2000 * TOKEN + streams  # what comes later is delayed, too
    assert cost(load(), 2000) == pytest.approx(alone, rel=0.1)
    cached = cost(load(cached=1600), 2000)
    assert cached == pytest.approx(FIXED + 2 * 400 * TOKEN + streams, rel=0.1)
    assert cached < cost(load(on_host=1600), 2000) < cached + 0.2 * 1600 * TOKEN
    assert cost(load(loading=0.3), 2000) == pytest.approx(alone + 0.3, rel=0.1)


WORKERS = strategies.builds(
    load,
    model=strategies.sampled_from([KNOWN, SLOW]),
    cached=strategies.integers(0, 1000),
    on_host=strategies.sampled_from([0, 0, 99]),
    loading=strategies.sampled_from([0.0, 0.0, 0.2]),
    prompt_tokens=strategies.integers(0, 20_000),
    num_prompts=strategies.integers(0, 8),
    num_decodes=strategies.sampled_from([0, 1, 7, 64]),
    context=strategies.integers(0, 64_000),
    num_ahead=strategies.integers(0, 8),
    max_tokens=strategies.sampled_from([512, 8192]),
)


@hypothesis.given(WORKERS, strategies.integers(1200, 4000))
def test_more_work_never_makes_a_worker_cheaper(given: Given, prompt: int) -> None:
    given = attrs.evolve(given, load=attrs.evolve(given.load, model=KNOWN))
    least = cost(given, prompt)
    for more in (
        {"prompt_tokens": given.load.prompt_tokens + 500},
        {"num_ahead": given.load.num_ahead + 1},
        {"model": SLOW},
    ):
        assert cost(attrs.evolve(given, load=attrs.evolve(given.load, **more)), prompt) >= least * (
            1 - 1e-6
        )
    # A step more may be needed.
    assert cost(attrs.evolve(given, cached=given.cached + 64), prompt) <= least * 1.02


@hypothesis.given(
    strategies.lists(WORKERS, min_size=1, max_size=12),
    strategies.integers(1200, 8000),
    strategies.sampled_from([None, 0.005, 0.05]),
)
def test_the_columns_have_the_costs_of_each_worker_alone(
    given: list[Given], prompt: int, target: float | None
) -> None:
    loads = Loads.of([each.load for each in given], target)
    costs = [predicted_cost(each, prompt, target) for each in given]
    prefix = prefix_of(given)
    assert loads.costs(prompt, prefix) == pytest.approx(costs, rel=1e-9)
    ttfts = [predicted_ttft(each, prompt, target) for each in given]
    assert loads.ttfts(prompt, prefix) == pytest.approx(ttfts, rel=1e-9)
    chosen = Policy().choose(loads, prompt, prefix)
    assert costs[chosen] == pytest.approx(min(costs), rel=1e-9)
    without_host = KnownPrefix(cached=prefix.cached + prefix.on_host)
    plain = [attrs.evolve(each, cached=each.cached + each.on_host, on_host=0, loading=0)
             for each in given]  # fmt: skip
    costs = [predicted_cost(each, prompt, target) for each in plain]
    assert loads.costs(prompt, without_host) == pytest.approx(costs, rel=1e-9)
    assert all(each >= predicted_ttft(one, prompt, target)
               for each, one in zip(costs, plain, strict=True))  # fmt: skip


def test_a_cached_prefix_is_left_only_where_waiting_costs_more() -> None:
    cached = load(cached=1900, prompt_tokens=1000)
    assert choose(Policy(), [load(), cached, load()], 2000) == 1
    cached = load(cached=1900, prompt_tokens=20_000)
    assert choose(Policy(), [cached, load()], 2000) == 1


def test_a_slower_worker_gets_less() -> None:
    slow = load(model=SLOW)
    assert choose(Policy(), [slow, load()], 1000) == 1
    assert choose(Policy(), [slow, load(prompt_tokens=4000, num_decodes=8)], 1000) == 0


def test_an_adapter_is_loaded_only_where_waiting_costs_more() -> None:
    without = load(loading=0.5)
    assert choose(Policy(), [without, load(prompt_tokens=3000)], 1000) == 1
    assert choose(Policy(), [without, load(prompt_tokens=8000)], 1000) == 0


def test_equals_take_turns() -> None:
    policy = Policy()
    assert [choose(policy, [load()] * 3, 100) for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_others_may_be_left_out() -> None:
    given = [load(), load(prompt_tokens=900), load()]
    loads, among = Loads.of([each.load for each in given]), np.array([False, True, False])
    for policy in (Policy(), Policy("round_robin"), Policy("prefix"), Policy(temperature=0.5)):
        assert policy.choose(loads, 100, prefix_of(given), among) == 1


def test_other_policies() -> None:
    few, many = load(num_decodes=2), load(num_decodes=9, cached=512)
    assert choose(Policy("least_loaded"), [many, few], 600) == 1
    assert choose(Policy("prefix"), [few, many], 600) == 1
    turns = Policy("round_robin")
    assert [choose(turns, [few, many], 600) for _ in range(3)] == [0, 1, 0]


def test_workers_that_may_not_be_chosen_now_may_be_later() -> None:
    loads = Loads.of([load(num_decodes=3).load, load(num_decodes=9).load])
    prefix = KnownPrefix(cached=np.zeros(2))
    policy = Policy("least_loaded", temperature=0.5)
    assert policy.choose(loads, 600, prefix, np.array([False, True])) == 1
    assert loads.num_sequences().tolist() == [3, 9]


def test_with_a_temperature_worse_ones_are_drawn_now_and_then() -> None:
    policy = Policy(temperature=0.5, seed=1)
    loads = [load(), load(prompt_tokens=1500), load(prompt_tokens=50_000)]
    drawn = Counter(choose(policy, loads, 1000) for _ in range(500))
    assert drawn[0] > drawn[1] > drawn[2]
    assert drawn[1] > 20


def test_nothing_is_known_at_first() -> None:
    unknown = load(model=StepTimeModel())
    busy = load(model=StepTimeModel(), prompt_tokens=3000)
    assert choose(Policy(), [busy, unknown], 100) == 1
    # Workers without steps so far are taken to be like the others.
    fast = load(model=model(speed=1000.0), num_decodes=1)
    assert choose(Policy(), [unknown, fast], 2000) == 0
    loads = Loads.of([unknown.load, fast.load])
    as_known = Loads.of([attrs.evolve(unknown.load, model=fast.load.model), fast.load])
    prefix = prefix_of([unknown, fast])
    assert loads.costs(99, prefix).tolist() == as_known.costs(99, prefix).tolist()


def test_lent_pages_are_fetched_if_that_is_sooner() -> None:
    loads = Loads.of([load().load, load().load, load().load])
    cached = np.array([0.0, 0.0, 1600.0])
    lent = np.array([0.0, 1600.0, 0.0])
    quick, slow = 0.01, 10.0
    own, fetched, there = loads.ttfts(2000, KnownPrefix(cached=cached, lent=lent, fetching=quick))
    assert own > fetched > there
    assert fetched - there == pytest.approx(quick, rel=1e-3)
    own, computed, _ = loads.ttfts(2000, KnownPrefix(cached=cached, lent=lent, fetching=slow))
    assert computed == own


def test_prompt_and_output_are_apart_if_that_costs_less() -> None:
    """One worker has many streams, the other one long prompts and hardly a free slot."""
    prefix, policy = KnownPrefix(cached=np.zeros(2)), Policy()
    streams = load(num_decodes=40, context=40_000).load
    idle = load().load
    assert policy.choose_apart(Loads.of([idle, idle]), 4000, prefix) is None
    assert policy.choose_apart(Loads.of([streams, idle]), 4000, prefix) is None, "one has room"
    full = load(num_decodes=4, num_ahead=20, context=4000).load
    loads = Loads.of([full, streams])
    assert policy.choose_apart(loads, 4000, prefix) == 0
    assert policy.choose_apart(loads, 4000, prefix, np.array([False, True])) is None
    dear = KnownPrefix(cached=np.zeros(2), handing_over=1000.0)
    assert policy.choose_apart(loads, 4000, dear) is None
