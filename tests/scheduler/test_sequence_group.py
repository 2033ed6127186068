"""Several outputs of one prompt: one prefill, shared pages, no delays, nothing left behind."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.support.scheduling import ABORT, Bench, make_limits, reference, worker
from trioserve.protocol import wire
from trioserve.protocol.errors import EngineError, InvalidRequest
from trioserve.protocol.sampling import SamplerParams
from trioserve.requests.request import Finish, FinishReason, Sequence, State
from trioserve.scheduler.prompt_planning import MAX_PENDING
from trioserve.testing import FakeWorker, hashed_token

PAGE = 4
PROMPT = list(range(3 * PAGE + 2))
LEFT = 2
"""Tokens of the prompt outside its full pages."""


def hashing(**options: Any) -> FakeWorker:
    return worker(token=hashed_token(256), **options)


def opened(bench: Bench) -> list[wire.OpenSlot]:
    return list(itertools.chain.from_iterable(plan.opened for plan in bench.plans))


def assert_all_right(bench: Bench, *sequences: Sequence) -> None:
    """Check that all sequences have the tokens of the unbatched reference, and no page is held."""
    for sequence in sequences:
        assert sequence.output_ids == reference(bench.worker, sequence)
    statistics = bench.core.statistics()
    assert statistics.pages_free + statistics.pages_cached == statistics.pages_total
    assert statistics.num_waiting == statistics.num_running == 0
    assert bench.worker.slots == {}


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("budget", [512, 8, 5, 4])
def test_the_prompt_is_computed_once(budget: int, depth: int, caching: bool) -> None:
    bench = Bench.make(
        hashing(max_num_batched_tokens=budget),
        max_plans_in_flight=depth,
        enable_prefix_caching=caching,
    )
    sequences = bench.submit_all(PROMPT, n=4, max_tokens=5)
    bench.drain()
    assert_all_right(bench, *sequences)
    assert len({tuple(sequence.output_ids) for sequence in sequences}) == 4
    num_decoded = 4 * (5 - 1)
    expected = len(PROMPT) + 3 * LEFT + num_decoded
    assert bench.core.counters.num_tokens_computed == expected


def test_siblings_share_the_full_pages_and_compute_the_rest_in_the_next_plan() -> None:
    bench = Bench.make(hashing())
    leader, *others = bench.submit_all(PROMPT, n=3)
    bench.plan()
    assert bench.rows(bench.plans[-1]) == [(0, len(PROMPT))]
    assert [each.state for each in others] == [State.WAITING] * 2
    bench.result()
    bench.plan()
    assert bench.rows(bench.plans[-1]) == [(0, 1), (1, LEFT), (2, LEFT)]
    for each in others:
        assert each.seq_state.pages[:3] == leader.seq_state.pages[:3]
        assert each.seq_state.pages[3] != leader.seq_state.pages[3]
    assert [slot.sampler.sequence_index for slot in opened(bench)] == [0, 1, 2]
    assert leader.request.num_cached_tokens == 0
    bench.drain()
    assert_all_right(bench, leader, *others)


def test_who_is_held_costs_nobody_a_turn() -> None:
    bench = Bench.make(hashing(num_pages=256))
    held = bench.submit_all(PROMPT, n=4 * MAX_PENDING)
    behind = bench.submit([9])
    bench.plan()
    assert behind.state is State.DECODE
    assert bench.core.num_waiting == len(held) - 1
    bench.plan()
    bench.drain()
    assert_all_right(bench, behind, *held)


def test_without_the_cache_requests_share_nothing() -> None:
    bench = Bench.make(hashing(), enable_prefix_caching=False)
    for _ in range(2):
        sequences = bench.submit_all(PROMPT, n=2)
        single = bench.submit(PROMPT)
        bench.drain()
        assert_all_right(bench, single, *sequences)
        assert sequences[0].request.num_cached_tokens == single.request.num_cached_tokens == 0
    from_start = [slot for slot in opened(bench) if slot.computed == 0]
    assert len(from_start) == 2 * 2


def test_the_next_one_leads_when_the_leader_is_aborted_in_line() -> None:
    bench = Bench.make(hashing())
    leader, second, third = bench.submit_all(PROMPT, n=3)
    assert bench.core.abort(leader, ABORT) is not None
    bench.core.check_integrity()
    bench.plan()
    assert (second.state, third.state) == (State.DECODE, State.WAITING)
    bench.drain()
    assert_all_right(bench, second, third)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_plans", [1, 2])
def test_the_next_one_goes_on_where_a_leader_was_aborted_in_prefill(
    num_plans: int, depth: int
) -> None:
    bench = Bench.make(hashing(max_num_batched_tokens=PAGE), max_plans_in_flight=depth)
    leader, second, third = bench.submit_all(PROMPT, n=3, prompt_logprobs=1)
    for _ in range(num_plans):
        bench.step()
    assert leader.state is State.PREFILL
    bench.core.abort(leader, ABORT)
    bench.drain()
    assert_all_right(bench, second, third)
    wanted = leader.request.prompt_logprobs
    assert wanted is not None
    assert wanted.stop == len(PROMPT)
    assert second.request.prompt_logprobs is wanted
    # What the leader had computed was found.
    assert [slot.computed > 0 for slot in opened(bench)] == [False, True, True]


def test_a_leader_whose_last_chunk_is_in_flight_may_leave() -> None:
    bench = Bench.make(hashing(), max_plans_in_flight=2)
    leader, second = bench.submit_all(PROMPT, n=2, prompt_logprobs=0)
    bench.plan()
    bench.core.abort(leader, ABORT)
    bench.plan()
    bench.drain()
    assert_all_right(bench, second)
    assert second.request.prompt_logprobs is not None
    assert second.request.prompt_logprobs.stop == len(PROMPT)


def test_a_leader_that_ends_early_has_let_the_others_go() -> None:
    bench = Bench.make(worker())
    leader, *others = bench.submit_all(PROMPT, n=3, max_tokens=6, stop=[len(PROMPT)])
    bench.drain()
    for each in (leader, *others):
        assert each.finish == Finish(FinishReason.STOP, stop_reason=len(PROMPT))
    assert_all_right(bench, leader, *others)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_leader_that_is_preempted_in_prefill_still_leads(depth: int) -> None:
    bench = Bench.make(hashing(num_pages=8, max_num_batched_tokens=2), max_plans_in_flight=depth)
    older = bench.submit([7] * PAGE, max_tokens=4 * PAGE)
    bench.step()
    leader, *others = bench.submit_all(PROMPT, n=3, max_tokens=PAGE, prompt_logprobs=2)
    while not bench.core.counters.num_preemptions:
        bench.step()
    wanted = leader.request.prompt_logprobs
    assert wanted is not None
    assert 1 < wanted.stop < len(PROMPT), "it wasn't in the midst of its prompt"
    assert len(bench.core.groups) == 2
    bench.drain()
    assert_all_right(bench, older, leader, *others)
    assert wanted.stop == len(PROMPT)


def lose_worker(bench: Bench) -> None:
    bench.core.recovery.on_worker_lost()
    bench.core.check_integrity()
    bench.results.clear()
    bench.worker = hashing()
    assert bench.core.recovery.restart(make_limits(bench.worker, max_plans_in_flight=2)) == []
    bench.core.check_integrity()


def test_siblings_are_held_again_when_the_prompt_is_lost_before_its_first_token() -> None:
    bench = Bench.make(hashing(), max_plans_in_flight=2)
    sequences = bench.submit_all(PROMPT, n=3, prompt_logprobs=0)
    bench.plan()
    bench.plan()
    assert [each.state for each in sequences] == [State.DECODE] * 3
    lose_worker(bench)
    assert (len(bench.core.waiting), len(bench.core.groups)) == (1, 2)
    bench.plans.clear()
    bench.drain()
    assert_all_right(bench, *sequences)
    assert [slot.computed for slot in opened(bench)] == [0, 3 * PAGE, 3 * PAGE]


def test_siblings_in_line_are_held_again_too() -> None:
    bench = Bench.make(hashing(max_num_seqs=1), max_plans_in_flight=2)
    sequences = bench.submit_all(PROMPT, n=3)
    bench.plan()
    assert (len(bench.core.waiting), len(bench.core.groups)) == (2, 0)
    lose_worker(bench)
    assert (len(bench.core.waiting), len(bench.core.groups)) == (1, 2)
    bench.drain()
    assert_all_right(bench, *sequences)


def test_nobody_is_held_for_a_leader_with_an_output() -> None:
    bench = Bench.make(hashing(), max_plans_in_flight=2)
    sequences = bench.submit_all(PROMPT, n=3)
    bench.step()
    bench.step()
    lose_worker(bench)
    assert (len(bench.core.waiting), len(bench.core.groups)) == (3, 0)
    bench.drain()
    assert_all_right(bench, *sequences)


def test_a_request_that_is_too_large_for_a_new_worker_ends_whole() -> None:
    bench = Bench.make(hashing())
    sequences = bench.submit_all(PROMPT, n=3)
    bench.core.recovery.on_worker_lost()
    small = hashing(num_pages=3)
    outputs = bench.core.recovery.restart(make_limits(small))
    bench.core.check_integrity()
    assert [output.sequence for output in outputs] == sequences
    assert len({output.finish for output in outputs}) == 1
    assert bench.core.num_waiting == 0


def test_the_one_to_blame_for_a_failure_takes_its_siblings_along() -> None:
    bench = Bench.make(hashing())
    sequences = bench.submit_all(PROMPT, n=3)
    other = bench.submit([1])
    bench.step()
    plan = bench.core.next_plan(0.0)
    assert plan is not None
    slot = sequences[1].seq_state.slot
    outputs = bench.core.recovery.on_failure(
        wire.Failure(number=plan.number, message="no", slot=slot)
    )
    assert [output.sequence for output in outputs] == sequences
    bench.core.check_integrity()
    bench.worker.reset(wire.Reset(next_plan=bench.core.next_number))
    bench.drain()
    assert_all_right(bench, other)


# ---- no tokens


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_for_no_tokens_computes_its_prompt_and_ends(depth: int, n: int) -> None:
    bench = Bench.make(hashing(max_num_batched_tokens=8), max_plans_in_flight=depth)
    sequences = bench.submit_all(PROMPT, n=n, max_tokens=0, prompt_logprobs=1)
    bench.drain()
    assert [output.sequence for output in bench.outputs] == sequences
    assert all(output.token_ids == () for output in bench.outputs)
    assert all(each.finish == Finish(FinishReason.LENGTH) for each in sequences)
    assert sequences[0].request.prompt_logprobs is not None
    assert sequences[0].request.prompt_logprobs.stop == len(PROMPT)
    assert len(opened(bench)) == 1, "a slot was opened for nothing"
    assert bench.core.counters.num_tokens_computed == len(PROMPT)
    assert bench.core.counters.num_tokens_sampled == 0
    again = bench.submit(PROMPT)
    bench.drain()
    assert again.request.num_cached_tokens == 3 * PAGE
    assert_all_right(bench, again)


def test_a_request_for_no_tokens_needs_room_for_the_one_that_is_drawn() -> None:
    bench = Bench.make(hashing(num_pages=3))
    with pytest.raises(InvalidRequest, match="room for 13 tokens"):
        bench.submit([1] * 12, max_tokens=0)
    bench.submit([1] * 11, max_tokens=0)
    bench.drain()
    assert [output.finish for output in bench.outputs] == [Finish(FinishReason.LENGTH)]


# ---- nothing to draw


def nothing_for_the_second(context: list[int], sampler: SamplerParams) -> int:
    """Return the model's next token; a request's second output gets no fifth token."""
    if sampler.sequence_index == 1 and len(context) == len(PROMPT) + 4:
        return -1
    return hashed_token(256)(context, sampler)


@pytest.mark.parametrize("computes_past_stop", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_no_token_to_draw_is_the_end_of_one_sequence_alone(
    depth: int, computes_past_stop: bool
) -> None:
    """End the sequence with an error; the detokenizer aborts the others of its request."""
    fake = worker(token=nothing_for_the_second, computes_past_stop=computes_past_stop)
    bench = Bench.make(fake, max_plans_in_flight=depth)
    others = [bench.submit(PROMPT, max_tokens=20, seed=seed) for seed in (0, 1)]
    unlucky = bench.submit_all(PROMPT, max_tokens=20, seed=2, n=3)
    bench.drain()
    finish = unlucky[1].finish
    assert finish is not None
    assert finish.reason is FinishReason.ERROR
    assert isinstance(finish.error, EngineError)
    assert "NaN" in str(finish.error)
    assert unlucky[1].output_ids == reference(fake, unlucky[1])[:4]
    assert [each.sequence for each in bench.outputs if each.finish is finish] == [unlucky[1]]
    assert_all_right(bench, *others, unlucky[0], unlucky[2])


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"allowed_token_ids": [1, 2], "bad_words": ["x"]}, "allowed_token_ids"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"extra_args": {"a": 1}}, "extra_args"),
        ({"min_tokens": 3, "stop": [9]}, "min_tokens"),
    ],
)
def test_a_request_that_masks_everything_is_told_by_what(params: Any, name: str) -> None:
    bench = Bench.make(worker(token=lambda *_: -1))
    sequence = bench.submit(PROMPT, **params)
    bench.drain()
    assert sequence.finish is not None
    error = sequence.finish.error
    assert isinstance(error, InvalidRequest)
    assert error.param == name
    assert sequence.output_ids == []


def test_min_tokens_mask_nothing_where_nothing_would_stop() -> None:
    bench = Bench.make(worker(token=lambda *_: -1))
    sequence = bench.submit(PROMPT, min_tokens=3)
    bench.drain()
    assert sequence.finish is not None
    assert isinstance(sequence.finish.error, EngineError)


def test_rows_are_not_spared_that_a_row_in_flight_of_one_who_left_reads() -> None:
    """Compute the leader's rows even after it has left, because its sibling reads them."""
    bench = Bench.make(worker(page_size=1), max_plans_in_flight=3)
    bench.submit([9] * 5, max_tokens=1)
    bench.plan()
    leader, sibling = bench.submit_all([1, 2, 3, 4], n=2)
    bench.plan()
    assert bench.rows(bench.plan()) == [(1, 1), (2, 1)]
    for sequence in (sibling, leader):
        assert bench.core.drop(sequence) is None
        bench.core.abort(sequence, ABORT)
        bench.core.check_integrity()
    bench.drain()
