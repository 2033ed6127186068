"""Results of a worker, their validation, and its failures."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from tests.support.scheduling import (
    ABORT,
    Bench,
    crowd,
    make_limits,
    reference,
    worker,
)
from trioserve.protocol import wire
from trioserve.protocol.errors import EngineError, WorkerLost
from trioserve.requests.request import Sequence, State
from trioserve.scheduler.core import SchedulerCore
from trioserve.scheduler.recovery import MAX_FAILURES
from trioserve.testing import FakeWorker, StepFails, fake_logprob

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
        # A worker may give every sequence as many as any sequence wants.
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


def test_a_worker_is_idle_only_while_there_is_work() -> None:
    bench = Bench.make(worker())

    def step() -> None:
        assert bench.plan() is not None
        times = {"step_us": 3, "gap_us": 1, "idle_us": 9, "launch_us": 2}
        bench.results = [attrs.evolve(result, **times) for result in bench.results]
        bench.result()

    bench.submit([1, 2, 3], max_tokens=3)
    for idle_us in (1, 11, 21):  # what passes within a step is lost in any case
        step()
        assert bench.core.statistics().idle_us == idle_us
    # The queue is empty now, so the time until the next request isn't lost.
    step()
    bench.submit([1, 2, 3], max_tokens=2)
    for idle_us in (23, 33):
        step()
        assert bench.core.statistics().idle_us == idle_us
    assert bench.core.statistics().step_us == 18
    assert bench.core.statistics().launch_us == 12


def test_an_observer_hears_of_steps_and_tokens() -> None:
    heard: list[tuple[Any, ...]] = []

    class Observer:
        def observe_step(self, num_tokens: int) -> None:
            heard.append(("step", num_tokens))

        def observe_tokens(self, sequence: Sequence, num_tokens: int, now: float) -> None:
            heard.append(("tokens", sequence.last_token, num_tokens, now))

    fake = worker()
    bench = Bench(fake, SchedulerCore(make_limits(fake), Observer()))
    bench.submit([1, 2, 3], max_tokens=2)
    bench.now = 1.0
    bench.step()
    bench.now = 2.0
    bench.drain()
    # The prompt and both tokens of the output count.
    assert heard == [("tokens", None, 1, 1.0), ("step", 4), ("tokens", 1.0, 1, 2.0), ("step", 1)]


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
        (lambda r: attrs.evolve(r, offsets=wire.from_ints([-1, 1, 2])), "fit neither rows"),
        (lambda r: attrs.evolve(r, offsets=b""), "fit neither rows"),
        (lambda r: attrs.evolve(r, tokens=r.tokens[:-1]), "result 1 is damaged"),
        (lambda r: attrs.evolve(r, offsets=r.offsets[:-1]), "result 1 is damaged"),
        (lambda r: attrs.evolve(r, tokens=wire.from_ints([3, 256])), "none of the vocabulary"),
        (lambda r: attrs.evolve(r, tokens=wire.from_ints([-3, 3])), "none of the vocabulary"),
        (lambda r: attrs.evolve(r, logprobs=b""), "without their log-prob"),
        (lambda r: attrs.evolve(r, logprobs=r.logprobs[4:]), "without their log-prob"),
        (lambda r: attrs.evolve(r, logprobs=r.logprobs[1:]), "result 1 is damaged"),
        (lambda r: attrs.evolve(r, top_offsets=r.top_offsets[4:]), "fit no tokens"),
        (lambda r: attrs.evolve(r, top_offsets=wire.from_ints([0, 3, 2])), "fit no tokens"),
        (lambda r: attrs.evolve(r, top_ids=wire.from_ints([0, 1, 2, 256])), "none of the vocab"),
        (lambda r: attrs.evolve(r, top_ids=wire.from_ints([0, 1, 2, -1])), "none of the vocab"),
        (lambda r: attrs.evolve(r, top_logprobs=r.top_logprobs[:4]), "come without their"),
    ],
)
def test_a_result_that_is_wrong_is_refused_whole(change: Change, message: str) -> None:
    bench = Bench.make(worker())
    sequences = [bench.submit([1, 2], logprobs=2), bench.submit([3], logprobs=2)]
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
    bench.core.recovery.on_worker_lost()
    bench.core.check_integrity()
    delivered = [list(sequence.output_ids) for sequence in sequences]
    assert all(sequence.state is State.WAITING for sequence in sequences)
    assert bench.core.next_plan(0.0) is None
    assert bench.core.statistics().pages_free == 32
    bench.results.clear()
    bench.worker = FakeWorker(num_pages=32, page_size=4)
    assert bench.core.recovery.restart(make_limits(bench.worker)) == []
    bench.drain()
    for sequence, before in zip(sequences, delivered, strict=True):
        assert sequence.output_ids[: len(before)] == before
        assert sequence.output_ids == reference(fake, sequence)


def test_a_smaller_worker_ends_who_no_longer_fits() -> None:
    bench = Bench.make(worker(num_pages=16))
    large = bench.submit([1] * 30, max_tokens=8)
    small = bench.submit([2] * 3, max_tokens=8)
    bench.step()
    bench.core.recovery.on_worker_lost()
    bench.results.clear()
    bench.worker = worker(num_pages=4)
    (output,) = bench.core.recovery.restart(make_limits(bench.worker))
    assert output.sequence is large
    assert output.finish is not None
    assert isinstance(output.finish.error, EngineError)
    bench.drain()
    assert len(small.output_ids) == 8


def fail(bench: Bench, **fault_isolation: Any) -> list[Any]:
    """Fail the next plan, and reset the worker as the scheduler's task would."""
    plan = bench.core.next_plan(0.0)
    assert plan is not None

    def script(_: int, __: wire.Plan) -> None:
        raise StepFails("no luck", **fault_isolation)

    bench.worker.script, script_before = script, bench.worker.script
    failure = bench.worker.step(plan)
    bench.worker.script = script_before
    assert isinstance(failure, wire.Failure)
    outputs = bench.core.recovery.on_failure(failure)
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
    (output,) = fail(bench, slot=bad.seq_state.slot)
    assert output.sequence is bad
    assert bad.finish is output.finish
    assert bad.finish is not None
    assert isinstance(bad.finish.error, EngineError)
    bench.drain()
    assert len(good.output_ids) == 8


def test_an_output_that_has_ended_takes_no_sibling_along() -> None:
    bench = Bench.make(worker(), max_plans_in_flight=2)
    first, second = bench.submit_all([1, 2, 3], n=2)
    for _ in range(3):
        bench.step()
    plan = bench.core.next_plan(0.0)
    assert plan is not None
    slot = first.seq_state.slot
    assert slot in wire.ints(plan.row_slots).tolist()
    bench.core.abort(first, ABORT)
    failure = wire.Failure(number=plan.number, message="the processor failed", slot=slot)
    assert bench.core.recovery.on_failure(failure) == []
    assert second.state is State.WAITING
    bench.core.check_integrity()


def test_who_was_alone_is_to_blame() -> None:
    bench = Bench.make(worker())
    alone = bench.submit([1])
    assert fail(bench) == []  # may have been an accident
    (output,) = fail(bench)
    assert output.sequence is alone


def test_a_worker_that_fails_whatever_it_computes_is_given_up() -> None:
    bench = Bench.make(worker())
    crowd(bench)  # of five
    blamed: list[Any] = []
    with pytest.raises(WorkerLost, match="no luck"):
        while True:
            blamed += fail(bench)
    assert len(blamed) == MAX_FAILURES - 1


def test_a_step_forgives_the_failures_before_it() -> None:
    bench = Bench.make(worker())
    alone = bench.submit([1], max_tokens=20)
    for _ in range(2 * MAX_FAILURES):
        assert fail(bench) == []
        bench.step()
    bench.drain()
    assert len(alone.output_ids) == 20


def test_a_fatal_failure_is_the_loss_of_the_worker() -> None:
    bench = Bench.make(worker())
    crowd(bench)
    with pytest.raises(WorkerLost, match="no luck"):
        fail(bench, fatal=True)


def test_the_failure_of_a_plan_that_is_not_in_flight_is_nonsense() -> None:
    bench = Bench.make(worker())
    with pytest.raises(WorkerLost, match="isn't in flight"):
        bench.core.recovery.on_failure(wire.Failure(number=3, message="?"))
