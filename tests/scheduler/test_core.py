"""The scheduler's state machine by hand, on a strict fake worker: admissions and shares."""

from __future__ import annotations

import attrs
import msgspec
import pytest

from tests.support.scheduling import (
    Bench,
    counting,
    reference,
    worker,
)
from trioserve.protocol import wire
from trioserve.protocol.errors import ContextTooLong, InvalidRequest
from trioserve.requests.request import Finish, FinishReason, Sequence, State
from trioserve.scheduler import plan_builder
from trioserve.scheduler.prompt_planning import MAX_PENDING
from trioserve.testing import FakeWorker

# ---- what fits


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        (0, 4, "the prompt is empty"),
        (
            20,
            None,
            "20 tokens in the prompt .*: this model's maximum context length is 20 tokens",
        ),
        (15, 6, "max_tokens of 6 are 21: this model's maximum context length is 20 tokens"),
    ],
)
def test_what_the_model_has_no_room_for_is_refused(
    prompt: int, max_tokens: int | None, message: str
) -> None:
    bench = Bench.make(worker(max_model_len=20))
    with pytest.raises(InvalidRequest, match=message):
        bench.submit([1] * prompt, max_tokens=max_tokens)
    assert len(bench.core.waiting) == 0


def test_a_plan_opens_no_more_than_a_message_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench.make(worker(), max_plans_in_flight=8)
    sequences = [bench.submit([number] * 5, max_tokens=3) for number in range(5)]
    plain = 5 * 4 + len(msgspec.msgpack.encode(sequences[0].sampler))
    monkeypatch.setattr(plan_builder, "MAX_OPENED_BYTES", 2 * plain)
    for _ in range(3):
        bench.plan()
    assert [len(plan.opened) for plan in bench.plans] == [2, 2, 1]
    bench.drain()
    assert all(sequence.state is State.FINISHED for sequence in sequences)


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
    assert bench.rows(bench.plans[-1]) == [(decoding.seq_state.slot, 1), (1, 7)]
    bench.step()
    assert bench.rows(bench.plans[-1]) == [(decoding.seq_state.slot, 1), (1, 5), (2, 2)]
    bench.step()
    assert bench.rows(bench.plans[-1]) == [(0, 1), (1, 1), (2, 1)]


def test_a_steady_plan_names_only_its_rows() -> None:
    bench = Bench.make(worker(page_size=16))
    bench.submit([1, 2])
    bench.submit([3, 4])
    bench.step()
    bench.step()
    plan = bench.plans[-1]
    changes = (plan.closed, plan.opened, plan.page_slots, plan.page_ids, plan.copies)
    assert changes == (b"", [], b"", b"", b"")
    assert len(wire.encode(plan)) < 110


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
    sequence.sampler = attrs.evolve(sequence.sampler, stop_ids=[4])
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
    """Skip it on the worker, though a plan in flight names it."""
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
    """Limit them, because each costs a walk of the tree, in every plan."""
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
