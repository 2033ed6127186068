"""The scheduler's state machine, driven by hand and at random, against a strict fake worker."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tests.scheduling import Bench, make_limits, make_request, reference
from trioserve import wire
from trioserve.errors import ContextTooLong, EngineError, InvalidRequest, WorkerLost
from trioserve.request import Finish, FinishReason, Request, Sequence, State
from trioserve.scheduler import SchedulerCore
from trioserve.scheduler.core import MAX_PENDING
from trioserve.testing import FakeWorker, StepFails, fake_logprob

ABORT = Finish(FinishReason.ABORT)


def counting(context: list[int], _: object) -> int:
    """A model that says how long its context is."""
    return len(context)


def worker(**options: Any) -> FakeWorker:
    return FakeWorker(**{"num_pages": 64, "page_size": 4, "token": counting, **options})


# ---- what fits


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        (0, 4, "the prompt is empty"),
        (20, None, "the prompt has 20 tokens, which leaves no room for output.* 20 tokens"),
        (15, 6, "the prompt has 15 tokens and max_tokens is 6, 21 together.* 20 tokens"),
    ],
)
def test_what_the_model_has_no_room_for_is_refused(
    prompt: int, max_tokens: int | None, message: str
) -> None:
    bench = Bench.make(worker(max_model_len=20))
    with pytest.raises(InvalidRequest, match=message):
        bench.submit([1] * prompt, max_tokens=max_tokens)
    assert len(bench.core.waiting) == 0


def test_what_the_pool_can_never_hold_is_refused_with_both_sizes() -> None:
    bench = Bench.make(worker(num_pages=3))
    with pytest.raises(ContextTooLong, match=r"room for 13 tokens.* holds 12 \(3 pages of 4\)"):
        bench.submit([1] * 8, max_tokens=5)
    with pytest.raises(ContextTooLong, match="room for 13 tokens"):
        bench.submit([1] * 12, max_tokens=None)


@pytest.mark.parametrize(("num_pages", "expected"), [(64, 17), (3, 9)])
def test_max_tokens_defaults_to_what_fits(num_pages: int, expected: int) -> None:
    bench = Bench.make(worker(max_model_len=20, num_pages=num_pages))
    sequence = bench.submit([1, 2, 3], max_tokens=None)
    bench.drain()
    assert sequence.max_tokens == len(sequence.output_ids) == expected
    assert sequence.finish == Finish(FinishReason.LENGTH)


# ---- plans


def test_decodes_come_first_then_chunks_in_what_is_left() -> None:
    bench = Bench.make(worker(max_num_batched_tokens=8))
    decoding = bench.submit([1, 2])
    bench.step()
    bench.submit([5] * 12)
    bench.submit([6] * 3)
    bench.step()
    assert bench.rows(bench.plans[-1]) == [(decoding.compute.slot, 1), (1, 7)]
    bench.step()
    assert bench.rows(bench.plans[-1]) == [(decoding.compute.slot, 1), (1, 5), (2, 2)]
    bench.step()
    assert bench.rows(bench.plans[-1]) == [(0, 1), (1, 1), (2, 1)]


def test_a_steady_plan_names_only_its_rows() -> None:
    bench = Bench.make(worker(page_size=16))
    bench.submit([1, 2])
    bench.submit([3, 4])
    bench.step()
    bench.step()
    plan = bench.plans[-1]
    assert (plan.closed, plan.opened, plan.page_slots, plan.page_ids) == (b"", [], b"", b"")
    assert len(wire.encode(plan)) < 100


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_length_is_known_beforehand_and_costs_no_row(depth: int) -> None:
    bench = Bench.make(worker(), max_plans_in_flight=depth)
    sequence = bench.submit([1, 2, 3], max_tokens=5)
    bench.drain()
    assert sequence.output_ids == [3, 4, 5, 6, 7]
    assert sum(count for plan in bench.plans for _, count in bench.rows(plan)) == 3 + 4
    assert len(bench.plans) == 5 + 1  # the last one closes the slot
    assert wire.ints(bench.plans[-1].closed).tolist() == [0]


@pytest.mark.parametrize("computes_past_stop", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_what_comes_after_a_stop_id_is_dropped(depth: int, computes_past_stop: bool) -> None:
    bench = Bench.make(worker(computes_past_stop=computes_past_stop), max_plans_in_flight=depth)
    sequence = bench.submit([1, 2, 3], max_tokens=20, stop=[6])
    bench.drain()
    assert sequence.output_ids == [3, 4, 5, 6]
    assert sequence.finish == Finish(FinishReason.STOP, stop_reason=6)
    assert [output.token_ids for output in bench.outputs] == [(3,), (4,), (5,), (6,)]
    assert [output.finish for output in bench.outputs][:-1] == [None] * 3
    rows = sum(len(bench.rows(plan)) for plan in bench.plans)
    assert rows == 4 + depth - 1, "more than the plans in flight was computed for nothing"


def test_the_models_own_end_has_no_stop_reason() -> None:
    bench = Bench.make(worker())
    sequence = bench.submit([1, 2, 3], max_tokens=20)
    sequence.sampler.stop_ids.append(4)
    bench.drain()
    assert sequence.output_ids == [3, 4]
    assert sequence.finish == Finish(FinishReason.STOP, stop_reason=None)


def test_no_more_than_the_depth_is_in_flight() -> None:
    bench = Bench.make(worker(), max_plans_in_flight=2)
    bench.submit([1])
    assert bench.plan() is not None
    assert bench.plan() is not None
    assert bench.plan() is None
    bench.result()
    assert bench.plan() is not None


def test_there_are_never_more_running_than_tokens_in_a_plan() -> None:
    bench = Bench.make(worker(max_num_batched_tokens=3))
    sequences = [bench.submit([number]) for number in range(5)]
    bench.step()
    assert len(bench.core.running) == 3
    bench.drain()
    assert all(sequence.state is State.FINISHED for sequence in sequences)


# ---- order


def first_rows(bench: Bench, sequences: dict[str, Sequence]) -> list[str]:
    """Names in the order in which they got their first token; room for one at a time."""
    bench.drain()
    names = {id(sequence): name for name, sequence in sequences.items()}
    return list(dict.fromkeys(names[id(output.sequence)] for output in bench.outputs))


def test_first_come_first_served() -> None:
    bench = Bench.make(worker(max_num_seqs=1))
    line = {name: bench.submit([1], priority=-ord(name)) for name in "abc"}
    assert first_rows(bench, line) == ["a", "b", "c"]


def test_nobody_overtakes_who_is_too_large_for_now() -> None:
    bench = Bench.make(worker(num_pages=6))
    first = bench.submit([1] * 8, max_tokens=4)
    bench.step()
    large = bench.submit([2] * 16, max_tokens=2)
    small = bench.submit([3], max_tokens=2)
    for _ in range(3):
        bench.step()
        assert large.state is small.state is State.WAITING
        assert bench.core.statistics().pages_free >= 1
    bench.drain()
    assert first.finish == large.finish == small.finish == Finish(FinishReason.LENGTH)


def test_priority_then_arrival() -> None:
    bench = Bench.make(worker(max_num_seqs=1), scheduling_policy="priority")
    priorities = {"a": 1, "b": 0, "c": 1, "d": -1}
    line = {name: bench.submit([1], priority=value) for name, value in priorities.items()}
    assert first_rows(bench, line) == ["d", "b", "a", "c"]


def test_longest_cached_prefix_first() -> None:
    bench = Bench.make(worker(max_num_seqs=1), scheduling_policy="lpm")
    bench.submit([7] * 12, max_tokens=1)
    bench.drain()
    prompts = {"none": [1] * 12, "one": [*[7] * 4, *[1] * 8], "two": [*[7] * 8, *[1] * 4]}
    line = {name: bench.submit(prompt) for name, prompt in prompts.items()}
    bench.outputs.clear()
    assert first_rows(bench, line) == ["two", "one", "none"]


# ---- prefixes


def test_a_second_prompt_finds_the_pages_of_the_first() -> None:
    bench = Bench.make(worker())
    first = bench.submit(list(range(10)), max_tokens=4)
    bench.drain()
    again = bench.submit(list(range(10)))
    longer = bench.submit([*range(10), *first.output_ids, 1])
    salted = bench.submit(list(range(10)), salt="other")
    bench.drain()
    assert first.request.num_cached_tokens == 0
    assert again.request.num_cached_tokens == 8
    assert longer.request.num_cached_tokens == 12  # the last token of the output has no KV
    assert salted.request.num_cached_tokens == 0
    statistics = bench.core.statistics()
    assert statistics.prefix_cache_hits == 20
    assert statistics.prefix_cache_queries == 10 + 10 + 15 + 10


def test_a_stop_id_that_fills_a_page_has_no_kv_to_share() -> None:
    """The worker doesn't compute it, though a plan in flight says so."""
    fake = FakeWorker(num_pages=16, page_size=4, token=counting)
    bench = Bench.make(fake, max_plans_in_flight=2)
    first = bench.submit([1, 2, 3], stop=[3])
    bench.drain()
    assert first.output_ids == [3]
    again = bench.submit([1, 2, 3, 3, 9])
    bench.drain()
    assert again.request.num_cached_tokens == 0
    assert again.output_ids == reference(fake, again)


def test_a_prefix_that_is_being_computed_is_awaited_and_not_computed_twice() -> None:
    bench = Bench.make(worker(max_num_batched_tokens=16), max_plans_in_flight=2)
    prompt = [1] * 40
    twins = [bench.submit([*prompt, number]) for number in range(3)]
    unrelated = bench.submit([9] * 3)
    bench.drain()
    assert [twin.request.num_cached_tokens for twin in twins] == [0, 40, 40]
    assert unrelated.output_ids[0] == 3
    first_tokens = [output.sequence for output in bench.outputs][:3]
    assert first_tokens[-1] is not unrelated, "it was held up by a prefix that isn't its own"


def test_only_so_many_are_put_off() -> None:
    """Each costs a walk of the tree, in every plan."""
    bench = Bench.make(worker(max_num_batched_tokens=100))
    for number in range(MAX_PENDING + 1):
        bench.submit([*[1] * 40, number])
    behind = bench.submit([9])
    bench.step()
    assert behind.state is State.WAITING
    bench.step()
    assert behind.state is State.DECODE


def test_without_the_cache_nothing_is_kept() -> None:
    bench = Bench.make(worker(), enable_prefix_caching=False)
    for _ in range(2):
        sequence = bench.submit([1] * 20)
        bench.drain()
        assert sequence.request.num_cached_tokens == 0
    assert bench.core.statistics().pages_free == 64


def test_cached_pages_make_room_for_new_ones() -> None:
    bench = Bench.make(worker(num_pages=8))
    for number in range(10):
        bench.submit([number] * 25, max_tokens=4)
        bench.drain()
    statistics = bench.core.statistics()
    assert statistics.pages_held == 0
    assert statistics.pages_cached > 0


# ---- capacity


def crowd(bench: Bench) -> list[Sequence]:
    return [bench.submit([number] * 6, max_tokens=20) for number in range(5)]


@pytest.mark.parametrize("depth", [1, 2])
def test_preempted_sequences_resume_where_they_were(depth: int) -> None:
    fake = FakeWorker(num_pages=10, page_size=4)
    bench = Bench.make(fake, max_plans_in_flight=depth)
    sequences = crowd(bench)
    bench.drain()
    assert bench.core.statistics().num_preemptions > 0
    assert [sequence.output_ids for sequence in sequences] == [
        reference(fake, sequence) for sequence in sequences
    ]


def test_the_first_in_line_is_never_preempted() -> None:
    bench = Bench.make(worker(num_pages=10))
    first = crowd(bench)[0]
    while first.state is not State.FINISHED:
        bench.step()
        assert first.state is not State.WAITING
    assert bench.core.counters.num_preemptions > 0


def test_a_prompt_can_be_preempted_between_its_chunks() -> None:
    fake = FakeWorker(num_pages=15, page_size=2, max_num_batched_tokens=3)
    bench = Bench.make(fake)
    decoding = bench.submit([1], max_tokens=20)
    bench.step()
    prompt = bench.submit([2] * 24, max_tokens=2)
    while not bench.core.counters.num_preemptions:
        bench.step()
        assert prompt.state is not State.DECODE
    bench.drain()
    assert decoding.output_ids == reference(fake, decoding)
    assert prompt.output_ids == reference(fake, prompt)


def preempt_with_plans_in_flight() -> tuple[Bench, Sequence]:
    """Two plans in flight, of which the second still names the sequence that was preempted, while
    the first brings the end of another."""
    bench = Bench.make(
        worker(num_pages=9, page_size=2), max_plans_in_flight=3, enable_prefix_caching=False
    )
    bench.submit([1], max_tokens=12)
    bench.submit([2] * 5, max_tokens=3)
    victim = bench.submit([3] * 3, max_tokens=8)
    while not bench.core.counters.num_preemptions:
        if bench.plan() is None:
            bench.result()
    assert victim.state is State.PREEMPTED
    return bench, victim


def test_nobody_overtakes_who_was_preempted() -> None:
    bench, victim = preempt_with_plans_in_flight()
    late = bench.submit([4], max_tokens=1)
    while victim.state in (State.PREEMPTED, State.WAITING):
        assert late.state is State.WAITING
        if bench.plan() is None:
            bench.result()
    bench.drain()
    assert late.output_ids == [1]


def test_who_was_preempted_can_leave_before_being_back_in_line() -> None:
    bench, victim = preempt_with_plans_in_flight()
    assert bench.core.abort(victim, ABORT) is not None
    bench.drain()
    assert bench.core.statistics().pages_free == 9


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_guaranteed_capacity_never_preempts(depth: int) -> None:
    bench = Bench.make(
        worker(num_pages=10), capacity_policy="guaranteed_no_evict", max_plans_in_flight=depth
    )
    sequences = crowd(bench)
    bench.step()
    assert len(bench.core.running) == 1
    bench.drain()
    assert bench.core.counters.num_preemptions == 0
    assert all(len(sequence.output_ids) == 20 for sequence in sequences)


def test_tokens_in_flight_of_a_preempted_sequence_are_delivered() -> None:
    bench = Bench.make(worker(num_pages=3, page_size=2), max_plans_in_flight=2)
    first = bench.submit([1], max_tokens=5)
    second = bench.submit([2], max_tokens=5)
    while bench.plan() is not None or bench.core.counters.num_preemptions == 0:
        if len(bench.results) == 2 and bench.core.counters.num_preemptions == 0:
            bench.result()
    before = len(second.output_ids)
    assert second.state is State.PREEMPTED
    assert second.compute not in list(bench.core.waiting)
    while second.state is State.PREEMPTED:
        bench.result()
    assert len(second.output_ids) > before
    bench.drain()
    assert first.output_ids == second.output_ids == [1, 2, 3, 4, 5]


# ---- what is in flight is out of reach


def test_pages_and_slots_in_flight_are_given_to_nobody() -> None:
    bench = Bench.make(
        worker(num_pages=2, max_num_seqs=2), max_plans_in_flight=2, enable_prefix_caching=False
    )
    leaving = bench.submit([1] * 7, max_tokens=1)
    bench.plan()
    bench.core.abort(leaving, ABORT)
    coming = bench.submit([2] * 7, max_tokens=1)
    closing = bench.plan()
    assert closing is not None
    assert wire.ints(closing.closed).tolist() == [0]
    assert closing.opened == []
    assert bench.core.statistics().pages_held == 2
    bench.result()
    plan = bench.plan()
    assert plan is not None
    (opened,) = plan.opened
    assert (opened.slot, opened.generation) == (0, 2)
    bench.drain()
    assert coming.output_ids == [7]


def test_who_needs_a_page_waits_for_those_that_retire_and_preempts_nobody() -> None:
    bench = Bench.make(
        worker(num_pages=7, page_size=2), max_plans_in_flight=2, enable_prefix_caching=False
    )
    staying = [bench.submit([number], max_tokens=6) for number in range(2)]
    leaving = bench.submit([3, 3, 3])
    bench.plan()
    for _ in range(3):
        bench.plan()
        bench.result()
    bench.core.abort(leaving, ABORT)
    assert bench.core.statistics().pages_free == 0
    plan = bench.plan()
    assert bench.rows(plan) == [], "it was given a page that is still in use"
    bench.result()
    assert len(bench.rows(bench.plan())) == 2
    bench.drain()
    assert bench.core.counters.num_preemptions == 0
    assert [sequence.output_ids[-1] for sequence in staying] == [6, 6]


@pytest.mark.parametrize("state", ["waiting", "prefill", "decode", "finished"])
@pytest.mark.parametrize("depth", [1, 2])
def test_an_abort_in_each_state_frees_everything(state: str, depth: int) -> None:
    bench = Bench.make(worker(max_num_batched_tokens=4), max_plans_in_flight=depth)
    sequence = bench.submit([1] * 10)
    while sequence.state.value != state:
        bench.step()
    first = bench.core.abort(sequence, ABORT)
    assert (first is None) == (state == "finished")
    assert bench.core.abort(sequence, ABORT) is None
    planned = len(bench.plans)
    bench.drain()
    assert all(not plan.row_slots for plan in bench.plans[planned:]), "computed after an abort"
    assert bench.worker.slots == {}
    statistics = bench.core.statistics()
    assert statistics.pages_held == statistics.num_running == statistics.num_waiting == 0


# ---- results


def test_times_are_the_steps() -> None:
    bench = Bench.make(worker())
    bench.now = 1.0
    sequence = bench.submit([1, 2], max_tokens=3)
    for bench.now in (2.0, 3.0):
        bench.plan()
    bench.now = 4.0
    bench.result()
    bench.now = 5.0
    bench.drain()
    times = sequence.request.times
    assert (times.queued, times.first_scheduled) == (1.0, 2.0)
    assert (times.first_token, times.last_token) == (4.0, 5.0)


def test_logprobs_only_for_who_asked() -> None:
    bench = Bench.make(worker())
    wanted = {None: (), 0: (), 3: (0, 1, 2)}
    for number, ranks in wanted.items():
        sequence = bench.submit([1, 2], max_tokens=1, logprobs=number)
        # A worker may give everybody as many as anybody wants.
        sequence.sampler = attrs.evolve(sequence.sampler, logprobs=5)
        other = bench.submit([1, 2], max_tokens=1, logprobs=2)
        bench.drain()
        (output,) = [each for each in bench.outputs if each.sequence is sequence]
        assert [each for each in bench.outputs if each.sequence is other]
        if number is None:
            assert output.logprobs is None
            continue
        assert output.logprobs is not None
        (entry,) = output.logprobs
        assert (entry.token_id, entry.text) == (2, "")
        assert math.isclose(entry.logprob, fake_logprob(2, 0), rel_tol=1e-6)
        assert [token for token, _, _ in entry.top] == [2 + rank for rank in ranks]
        assert [logprob for _, logprob, _ in entry.top] == pytest.approx(
            [fake_logprob(2, rank) for rank in ranks]
        )


def test_an_observer_hears_of_steps_and_tokens() -> None:
    heard: list[tuple[Any, ...]] = []

    class Observer:
        def observe_step(self, num_tokens: int) -> None:
            heard.append(("step", num_tokens))

        def observe_tokens(self, times: Any, num_tokens: int, now: float) -> None:
            heard.append(("tokens", times.last_token, num_tokens, now))

    fake = worker()
    bench = Bench(fake, SchedulerCore(make_limits(fake), Observer()))
    bench.submit([1, 2, 3], max_tokens=2)
    bench.now = 1.0
    bench.step()
    bench.now = 2.0
    bench.drain()
    assert heard == [("step", 3), ("tokens", None, 1, 1.0), ("step", 1), ("tokens", 1.0, 1, 2.0)]


Change = Callable[[wire.StepResult], wire.StepResult]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: attrs.evolve(r, number=7), "result of plan 7 came instead of 1"),
        (lambda r: attrs.evolve(r, slots=wire.from_ints([0, 2])), "aren't those of its plan"),
        (lambda r: attrs.evolve(r, generations=wire.from_ints([1, 2])), "aren't those of"),
        (lambda r: attrs.evolve(r, offsets=wire.from_ints([0, 1, 3])), "fit neither rows"),
        (lambda r: attrs.evolve(r, offsets=wire.from_ints([0, 2, 2])), "2 tokens for slot 1"),
        (lambda r: attrs.evolve(r, offsets=wire.from_ints([0, 2])), "fit neither rows"),
        (
            lambda r: attrs.evolve(r, offsets=wire.from_ints([0, 0, 0]), tokens=b""),
            "0 tokens for slot 1, where 1 was due",
        ),
    ],
)
def test_a_result_that_is_wrong_is_refused_whole(change: Change, message: str) -> None:
    bench = Bench.make(worker())
    sequences = [bench.submit([1, 2]), bench.submit([3])]
    bench.plan()
    with pytest.raises(WorkerLost, match=message):
        bench.core.on_result(change(bench.results[0]), 0.0)
    assert all(sequence.output_ids == [] for sequence in sequences)
    bench.core.check_integrity()


def test_a_result_that_nobody_asked_for_is_refused() -> None:
    bench = Bench.make(worker())
    bench.submit([1])
    bench.plan()
    result = bench.results[0]
    bench.result()
    with pytest.raises(WorkerLost, match="none is in flight"):
        bench.core.on_result(result, 0.0)


# ---- failures


def test_a_lost_worker_is_preemption_of_everybody() -> None:
    fake = FakeWorker(num_pages=32, page_size=4)
    bench = Bench.make(fake, max_plans_in_flight=2)
    sequences = crowd(bench)
    for _ in range(6):
        bench.step()
    bench.core.on_worker_lost()
    bench.core.check_integrity()
    delivered = [list(sequence.output_ids) for sequence in sequences]
    assert all(sequence.state is State.WAITING for sequence in sequences)
    assert bench.core.next_plan(0.0) is None
    assert bench.core.statistics().pages_free == 32
    bench.results.clear()
    bench.worker = FakeWorker(num_pages=32, page_size=4)
    assert bench.core.restart(make_limits(bench.worker)) == []
    bench.drain()
    for sequence, before in zip(sequences, delivered, strict=True):
        assert sequence.output_ids[: len(before)] == before
        assert sequence.output_ids == reference(fake, sequence)


def test_a_smaller_worker_ends_who_no_longer_fits() -> None:
    bench = Bench.make(worker(num_pages=16))
    large = bench.submit([1] * 30, max_tokens=8)
    small = bench.submit([2] * 3, max_tokens=8)
    bench.step()
    bench.core.on_worker_lost()
    bench.results.clear()
    bench.worker = worker(num_pages=4)
    (output,) = bench.core.restart(make_limits(bench.worker))
    assert output.sequence is large
    assert output.finish is not None
    assert isinstance(output.finish.error, EngineError)
    bench.drain()
    assert len(small.output_ids) == 8


def fail(bench: Bench, **blame: Any) -> list[Any]:
    """The next plan fails; the worker is reset as the scheduler's task would."""
    plan = bench.core.next_plan(0.0)
    assert plan is not None

    def script(_: int, __: wire.Plan) -> None:
        raise StepFails("no luck", **blame)

    bench.worker.script, script_before = script, bench.worker.script
    failure = bench.worker.step(plan)
    bench.worker.script = script_before
    assert isinstance(failure, wire.Failure)
    outputs = bench.core.on_failure(failure)
    bench.core.check_integrity()
    bench.worker.reset(wire.Reset(next_plan=bench.core.next_number))
    return outputs


def test_a_failure_without_blame_costs_nobody_anything() -> None:
    fake = FakeWorker(num_pages=32, page_size=4)
    bench = Bench.make(fake)
    sequences = crowd(bench)
    bench.step()
    assert fail(bench) == []
    bench.drain()
    assert all(sequence.output_ids == reference(fake, sequence) for sequence in sequences)


def test_the_slot_that_is_blamed_ends_and_the_others_go_on() -> None:
    bench = Bench.make(worker())
    good, bad = bench.submit([1]), bench.submit([2])
    bench.step()
    (output,) = fail(bench, slot=bad.compute.slot)
    assert output.sequence is bad
    assert bad.finish is output.finish
    assert bad.finish is not None
    assert isinstance(bad.finish.error, EngineError)
    bench.drain()
    assert len(good.output_ids) == 8


def test_who_was_alone_is_to_blame() -> None:
    bench = Bench.make(worker())
    alone = bench.submit([1])
    (output,) = fail(bench)
    assert output.sequence is alone


def test_a_worker_that_fails_again_and_again_is_given_up() -> None:
    bench = Bench.make(worker())
    crowd(bench)
    fail(bench)
    fail(bench)
    bench.step()  # forgives
    fail(bench)
    fail(bench)
    with pytest.raises(WorkerLost, match="no luck"):
        fail(bench)


def test_a_fatal_failure_is_the_loss_of_the_worker() -> None:
    bench = Bench.make(worker())
    crowd(bench)
    with pytest.raises(WorkerLost, match="no luck"):
        fail(bench, fatal=True)


def test_the_failure_of_a_plan_that_is_not_in_flight_is_nonsense() -> None:
    bench = Bench.make(worker())
    with pytest.raises(WorkerLost, match="isn't in flight"):
        bench.core.on_failure(wire.Failure(number=3, message="?"))


# ---- everything at once, at random

prompts = st.one_of(
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.integers(1, 20).map(lambda length: [1] * length),
)


class CoreMachine(RuleBasedStateMachine):
    """Requests, aborts, plans, late results, failures and deaths in any order.

    At the end everybody has exactly the tokens of the unbatched reference, or, where it was ended
    early, a prefix of them.
    """

    @initialize(
        fake=st.builds(
            FakeWorker,
            num_pages=st.integers(6, 16),
            page_size=st.integers(1, 3),
            vocab_size=st.just(12),
            max_num_seqs=st.integers(1, 5),
            max_num_batched_tokens=st.integers(1, 12),
            computes_past_stop=st.booleans(),
        ),
        limits=st.fixed_dictionaries(
            {
                "max_plans_in_flight": st.integers(1, 3),
                "enable_prefix_caching": st.sampled_from([True, True, False]),
                "scheduling_policy": st.sampled_from(["fcfs", "lpm", "priority"]),
                "capacity_policy": st.sampled_from(["max_utilization", "guaranteed_no_evict"]),
            }
        ),
    )
    def start(self, fake: FakeWorker, limits: dict[str, Any]) -> None:
        self.options = limits
        self.bench = Bench.make(fake, **limits)
        self.requests: list[Request] = []
        self.ends: collections.Counter[int] = collections.Counter()
        self.delivered: dict[int, list[int]] = collections.defaultdict(list)

    def note(self, outputs: list[Any]) -> None:
        for output in outputs:
            key = id(output.sequence)
            assert not self.ends[key], "something came after the end"
            self.delivered[key] += output.token_ids
            self.ends[key] += output.finish is not None

    @rule(
        prompt=prompts,
        max_tokens=st.one_of(st.none(), st.integers(1, 15)),
        stop=st.lists(st.integers(0, 11), max_size=1),
        seed=st.integers(0, 1),
        priority=st.integers(0, 2),
        salt=st.sampled_from(["", "", "salt"]),
    )
    def submit(self, prompt: list[int], max_tokens: int | None, **options: Any) -> None:
        request = make_request(prompt, max_tokens=max_tokens, **options)
        try:
            self.bench.core.submit(request, 0.0)
        except ContextTooLong:
            pool = self.bench.worker.num_pages * self.bench.worker.page_size
            assert len(prompt) + (max_tokens or 1) > pool
        else:
            self.requests.append(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.requests)).sequences[0]
        output = self.bench.core.abort(sequence, ABORT)
        assert (output is None) == (self.ends[id(sequence)] > 0)
        self.note([] if output is None else [output])

    @rule(times=st.integers(1, 3))
    def plan(self, times: int) -> None:
        for _ in range(times):
            self.bench.plan()

    @precondition(lambda self: self.bench.results)
    @rule()
    def result(self) -> None:
        self.note(self.bench.result())

    @rule(steps=st.integers(1, 10))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.note(self.bench.step())

    @rule()
    def worker_dies(self) -> None:
        self.bench.core.on_worker_lost()
        self.bench.core.check_integrity()
        self.bench.results.clear()
        old = self.bench.worker
        self.bench.worker = FakeWorker(
            **{
                field.name: getattr(old, field.name)
                for field in attrs.fields(FakeWorker)
                if field.init
            }
        )
        self.note(self.bench.core.restart(make_limits(self.bench.worker, **self.options)))

    @precondition(lambda self: self.bench.core.in_flight)
    @rule()
    def plan_fails(self) -> None:
        """The worker turns out to have failed on the oldest plan in flight."""
        oldest = self.bench.core.in_flight[0]
        # The others of a real worker's plans would be refused; this one has run them, and forgets.
        self.bench.results.clear()
        failure = wire.Failure(number=oldest.number, message="no luck")
        try:
            self.note(self.bench.core.on_failure(failure))
        except WorkerLost:
            self.worker_dies()
        else:
            self.bench.worker.reset(wire.Reset(next_plan=self.bench.core.next_number))

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "bench"):
            return
        core = self.bench.core
        core.check_integrity()
        if core.limits.capacity_policy == "guaranteed_no_evict":
            assert core.counters.num_preemptions == 0
        for request in self.requests:
            (sequence,) = request.sequences
            assert self.delivered[id(sequence)] == sequence.output_ids
            assert (sequence.state is State.FINISHED) == self.ends[id(sequence)]

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        bench = self.bench
        while bench.plan() is not None or bench.results:
            self.note(bench.step())
        self.sound()
        statistics = bench.core.statistics()
        assert statistics.pages_free + statistics.pages_cached == statistics.pages_total
        assert bench.worker.slots == {}
        for sequence in itertools.chain.from_iterable(r.sequences for r in self.requests):
            expected = reference(bench.worker, sequence)
            assert self.ends[id(sequence)] == 1
            assert sequence.finish is not None
            if sequence.finish.reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert sequence.output_ids == expected
            else:
                assert sequence.output_ids == expected[: len(sequence.output_ids)]


TestCore = CoreMachine.TestCase
TestCore.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
