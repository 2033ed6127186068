"""The columns of a step: what is done for all rows at once comes out as if done one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.scheduling import ABORT, Bench, make_limits, make_request, worker
from trioserve.observability.metrics import Metrics
from trioserve.observability.metrics.histogram import INTER_TOKEN_SECONDS, Histogram
from trioserve.protocol import wire
from trioserve.protocol.token_ids import as_column
from trioserve.scheduler.core import SchedulerCore
from trioserve.scheduler.result_processing import ResultProcessor
from trioserve.scheduler.token_counts import TokenCounts

ROWS, TOKENS = 20, 12


def bench_of(metrics: Metrics | None = None, **limits: Any) -> Bench:
    made = worker(max_num_seqs=ROWS, num_pages=500)
    return Bench(made, SchedulerCore(make_limits(made, **limits), metrics))


@pytest.mark.parametrize("depth", [1, 2])
def test_only_first_and_last_tokens_are_looked_at_one_by_one(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Any] = []
    accept = ResultProcessor._accept

    def counting(self: ResultProcessor, seq_state: Any, *rest: Any) -> Any:
        taken.append(seq_state.sequence)
        return accept(self, seq_state, *rest)

    monkeypatch.setattr(ResultProcessor, "_accept", counting)
    bench = bench_of(max_plans_in_flight=depth)
    requests = [make_request([number, 1, 2], max_tokens=TOKENS) for number in range(ROWS)]
    for request in requests:
        bench.core.submit(request, 0.0)
    bench.drain()
    assert [len(request.sequences[0].output_ids) for request in requests] == [TOKENS] * ROWS
    assert sorted(map(id, taken)) == sorted(id(r.sequences[0]) for r in requests for _ in "12")


def test_metrics_and_times_are_those_of_every_token() -> None:
    metrics = Metrics("m")
    bench = bench_of(metrics)
    requests = [make_request([number, 1], max_tokens=TOKENS) for number in range(3)]
    for request in requests:
        bench.core.submit(request, 0.0)
    while bench.core.num_unfinished:
        bench.now += 0.25
        bench.step()
    assert metrics.generation_tokens == 3 * TOKENS == bench.core.counters.num_tokens_sampled
    assert sum(metrics.inter_token_latency.counts) == 3 * (TOKENS - 1)
    assert metrics.inter_token_latency.total == pytest.approx(3 * (TOKENS - 1) * 0.25)
    assert sum(metrics.time_to_first_token.counts) == 3
    for request in requests:
        assert request.times.first_token == 0.25
        assert request.times.last_token == request.sequences[0].last_token == TOKENS * 0.25


def test_who_leaves_in_between_knows_when_the_last_token_came() -> None:
    bench = bench_of()
    request = make_request([1, 2], max_tokens=TOKENS)
    bench.core.submit(request, 0.0)
    for _ in range(5):
        bench.now += 1.0
        bench.step()
    sequence = request.sequences[0]
    assert len(sequence.output_ids) == 5
    bench.core.abort(sequence, ABORT)
    assert sequence.last_token == request.times.last_token == 5.0


def test_what_a_worker_still_drew_for_who_has_ended_is_nobodys() -> None:
    """Drop a token of a sequence that is gone; a chunk of a prompt gives none."""
    bench = bench_of(max_num_batched_tokens=4)
    gone = make_request([1] * 9, max_tokens=TOKENS)
    stays = make_request([2, 3], max_tokens=TOKENS)
    for request in (stays, gone):
        bench.core.submit(request, 0.0)
    plan = bench.core.next_plan(0.0)
    assert plan is not None
    rows = dict(zip(wire.ints(plan.row_slots), wire.ints(plan.row_counts), strict=True))
    generations = {each.slot: each.generation for each in plan.opened}
    bench.core.abort(gone.sequences[0], ABORT)
    result = wire.StepResult(
        number=plan.number,
        slots=plan.row_slots,
        generations=wire.from_ints([generations[slot] for slot in rows]),
        offsets=wire.from_ints(range(len(rows) + 1)),
        tokens=wire.from_ints([7] * len(rows)),
    )
    assert len(rows) == 2
    (output,) = bench.core.on_result(result, 1.0)
    assert output.sequence is stays.sequences[0]
    assert (stays.sequences[0].output_ids, gone.sequences[0].output_ids) == ([7], [])
    bench.core.check_integrity()


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=50))
def test_a_histogram_counts_many_as_it_counts_one(values: list[float]) -> None:
    values += [INTER_TOKEN_SECONDS[3], INTER_TOKEN_SECONDS[-1]]
    one_by_one, together = Histogram(INTER_TOKEN_SECONDS), Histogram(INTER_TOKEN_SECONDS)
    for value in values:
        one_by_one.observe(value)
    together.observe_all(np.array(values))
    assert together.counts == one_by_one.counts
    assert together.total == pytest.approx(one_by_one.total)


@given(st.lists(st.lists(st.integers(-3, 12), max_size=4), max_size=6), st.data())
def test_a_token_may_stop_somebody_exactly_while_one_of_them_is_there(
    stop_ids: list[list[int]], data: st.DataObject
) -> None:
    counts = TokenCounts(len(stop_ids), vocab_size=10)
    for slot, ids in enumerate(stop_ids):
        counts.open(slot, 1, limit=9, plain=True, stop_ids=as_column(ids))
    there = dict(enumerate(stop_ids))
    for slot in data.draw(st.permutations(list(there))):
        known = {token for ids in there.values() for token in ids}
        found = counts.may_stop(np.arange(10)).tolist()
        assert found == [token in known for token in range(10)]
        counts.close(slot, as_column(there.pop(slot)))
    assert not counts.may_stop(np.arange(10)).any()
