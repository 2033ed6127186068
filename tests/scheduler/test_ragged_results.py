"""Rows that bring several tokens: outputs, ends and counts are those of one token a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.scheduling import (
    ABORT,
    Bench,
    make_limits,
    reference,
    sometimes_nothing,
    worker,
)
from trioserve.protocol import wire
from trioserve.protocol.errors import InvalidRequest, WorkerLost
from trioserve.requests.request import FinishReason, Request, Sequence, SequenceOutput
from trioserve.scheduler import drafts
from trioserve.scheduler.core import SchedulerCore
from trioserve.scheduler.memory import Memory
from trioserve.scheduler.result_processing import ResultProcessor
from trioserve.scheduler.sequence_state import SequenceState
from trioserve.testing import FakeWorker

VOCAB = 12
UNLUCKY = 2


def drafting(*accepted: int, **options: Any) -> FakeWorker:
    """Return a worker with rows that bring drafted tokens: ``accepted`` for one row after the
    other.
    """
    left = list(accepted)
    fields = {"max_row_tokens": 5, "accepted": lambda _: left.pop(0) if left else 4}
    return worker(**{**fields, **options})


def tokens_by_step(bench: Bench, sequence: Sequence) -> list[tuple[int, ...]]:
    return [output.token_ids for output in bench.outputs if output.sequence is sequence]


@attrs.frozen
class Seen:
    """A finished sequence as its caller sees it, whatever the steps were."""

    tokens: list[int]
    logprobs: list[Any]
    reason: FinishReason
    stop_reason: int | str | None
    error: str


def seen(outputs: list[SequenceOutput], sequence: Sequence) -> Seen:
    own = [output for output in outputs if output.sequence is sequence]
    tokens = [token for output in own for token in output.token_ids]
    assert tokens == sequence.output_ids
    (finish,) = [output.finish for output in own if output.finish is not None]
    assert own[-1].finish is finish
    return Seen(
        tokens,
        [entry for output in own for entry in output.logprobs or ()],
        finish.reason,
        finish.stop_reason,
        repr(finish.error),
    )


def has_failed(request: Request) -> bool:
    return any(each.finish is not None and each.finish.error for each in request.sequences)


requests = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9),
        "max_tokens": st.integers(0, 14),
        "stop": st.lists(st.integers(0, VOCAB - 1), max_size=2, unique=True).map(sorted),
        "seed": st.integers(0, UNLUCKY),
        "n": st.sampled_from([1, 1, 3]),
    }
)
logprobs_wanted = st.sampled_from(
    [{}, {}, {"logprobs": 0}, {"logprobs": 2, "logprob_token_ids": [1, 4]}]
)


@given(
    asked=st.lists(st.tuples(requests, logprobs_wanted), min_size=1, max_size=4),
    accepted=st.lists(st.integers(0, 6), max_size=30),
    options=st.fixed_dictionaries(
        {
            "num_pages": st.integers(12, 30),
            "page_size": st.integers(1, 4),
            "max_num_batched_tokens": st.integers(3, 20),
            "max_num_seqs": st.integers(1, 6),
            "computes_past_stop": st.booleans(),
        }
    ),
    depth=st.integers(1, 3),
    most=st.integers(2, 7),
)
def test_any_split_into_rows_gives_the_same(
    asked: list[tuple[dict[str, Any], dict[str, Any]]],
    accepted: list[int],
    options: dict[str, Any],
    depth: int,
    most: int,
) -> None:
    room = options["num_pages"] * options["page_size"]

    def run(max_row_tokens: int) -> list[Seen]:
        left = list(accepted)
        fake = FakeWorker(
            vocab_size=VOCAB,
            token=sometimes_nothing(VOCAB, UNLUCKY),
            max_row_tokens=max_row_tokens,
            accepted=lambda _: left.pop() if left else max_row_tokens,
            **options,
        )
        bench = Bench.make(fake, max_plans_in_flight=depth)
        sequences = [
            sequence
            for request, logprobs in asked
            if len(request["prompt"]) + max(request["max_tokens"], 1) <= room
            for sequence in bench.submit_all(**request, **logprobs)
        ]
        bench.drain()
        accepted_tokens = sum(len(each.output_ids) for each in sequences)
        assert bench.core.statistics().num_tokens_sampled == accepted_tokens
        # An error of one output ends its siblings, wherever those are by then.
        return [
            seen(bench.outputs, each)
            for each in sequences
            if each.request.params.n == 1 or not has_failed(each.request)
        ]

    assert run(most) == run(1)


def test_a_step_brings_all_that_was_accepted() -> None:
    bench = Bench.make(drafting(2, 0, 1))
    sequence = bench.submit([1, 2, 3], max_tokens=9)
    bench.drain()
    assert tokens_by_step(bench, sequence) == [(3,), (4, 5, 6), (7,), (8, 9), (10, 11)]
    counts = [dict(bench.rows(plan)).get(0) for plan in bench.plans]
    # The last row drafts no more than its sequence could take.
    assert counts == [3, 5, 5, 4, 2, None]


def test_a_stop_id_ends_a_sequence_in_the_middle_of_its_row() -> None:
    bench = Bench.make(drafting(3, computes_past_stop=True))
    sequence = bench.submit([1, 2, 3], max_tokens=20, stop=[5], logprobs=1)
    bench.drain()
    assert tokens_by_step(bench, sequence) == [(3,), (4, 5)]
    assert [len(each.logprobs or ()) for each in bench.outputs] == [1, 2]
    assert sequence.finish is not None
    assert (sequence.finish.reason, sequence.finish.stop_reason) == (FinishReason.STOP, 5)
    assert bench.core.statistics().num_tokens_sampled == 3


def test_the_length_ends_a_sequence_in_the_middle_of_its_row() -> None:
    # A worker may bring what the scheduler gave it room for, which is never past the end.
    bench = Bench.make(drafting(4, 4))
    sequence = bench.submit([1, 2, 3], max_tokens=4)
    bench.drain()
    assert tokens_by_step(bench, sequence) == [(3,), (4, 5, 6)]
    assert sequence.finish is not None
    assert sequence.finish.reason is FinishReason.LENGTH


def test_what_comes_before_no_token_is_delivered() -> None:
    def until_six(context: list[int], _: object) -> int:
        return len(context) if len(context) < 6 else -1

    bench = Bench.make(drafting(4, token=until_six))
    sequence = bench.submit([1, 2, 3], max_tokens=20, allowed_token_ids=list(range(20)))
    sequence.sampler = attrs.evolve(sequence.sampler, allowed_token_ids=b"")
    bench.drain()
    assert tokens_by_step(bench, sequence) == [(3,), (4, 5), ()]
    assert sequence.finish is not None
    assert isinstance(sequence.finish.error, InvalidRequest)
    assert bench.core.statistics().num_tokens_sampled == 3


def test_drafts_take_what_is_left_of_the_budget() -> None:
    fake = drafting(*[4] * 50, max_num_batched_tokens=7)
    bench = Bench.make(fake)
    sequences = [bench.submit([number], max_tokens=30) for number in range(3)]
    bench.step()
    bench.step()
    assert sorted(bench.rows(bench.plans[-1])) == [(0, 5), (1, 1), (2, 1)]
    bench.drain()
    assert all(each.output_ids == reference(fake, each) for each in sequences)


def test_drafts_preempt_nothing() -> None:
    fake = drafting(*[4] * 50, num_pages=4, page_size=4)
    bench = Bench.make(fake)
    first, second = (bench.submit([number] * 4, max_tokens=5) for number in (1, 2))
    bench.drain()
    assert bench.core.statistics().num_preemptions == 0
    assert first.output_ids == second.output_ids == [4, 5, 6, 7, 8]


@pytest.mark.parametrize(("takes_back", "num_preemptions"), [(True, 0), (False, 1)])
def test_pages_of_refused_drafts_are_taken_back_before_a_sequence_is_preempted(
    takes_back: bool, num_preemptions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not takes_back:
        monkeypatch.setattr(Memory, "take_back_spare", lambda *_: False)
    fake = drafting(*[0] * 20, num_pages=6, page_size=2)
    bench = Bench.make(fake)
    sequences = [bench.submit([1] * 3, max_tokens=5), bench.submit([2] * 3, max_tokens=3)]
    bench.drain()
    assert bench.core.statistics().num_preemptions == num_preemptions
    assert any(plan.cuts for plan in bench.plans) == takes_back
    assert all(each.output_ids == reference(fake, each) for each in sequences)


def test_nothing_follows_a_row_of_unknown_length() -> None:
    bench = Bench.make(drafting(2), max_plans_in_flight=2)
    sequence = bench.submit([1, 2, 3], max_tokens=20)
    other = bench.submit([1] * 3, max_tokens=0)
    bench.plan()
    bench.plan()
    bench.result()
    bench.result()
    assert bench.plan() is not None
    assert bench.plan() is None
    assert other.finish is not None
    bench.core.abort(sequence, ABORT)
    bench.result()
    bench.core.check_integrity()
    assert sequence.output_ids == [3, 4]


def test_a_sequence_without_drafts_has_rows_of_one_token_in_every_plan() -> None:
    bench = Bench.make(drafting(*[4] * 20), max_plans_in_flight=2)
    plain, drafted = (
        bench.submit([number] * 3, max_tokens=9, speculative=wanted)
        for number, wanted in ((1, False), (2, True))
    )
    bench.step()
    third = bench.plan()
    bench.result()
    fourth = bench.plan()
    assert [dict(bench.rows(plan)) for plan in (third, fourth)] == [{0: 1, 1: 5}, {0: 1}]
    bench.drain()
    assert plain.output_ids == drafted.output_ids == list(range(3, 12))


def test_a_preempted_sequence_gets_all_of_its_row() -> None:
    fake = drafting(3)
    bench = Bench.make(fake)
    sequence = bench.submit([1, 2, 3], max_tokens=12)
    bench.step()
    bench.plan()
    bench.core.retract_running()
    bench.result()
    assert sequence.output_ids == [3, 4, 5, 6, 7]
    bench.drain()
    assert sequence.output_ids == reference(fake, sequence)


def test_accepted_drafts_are_found_in_the_prefix_cache() -> None:
    bench = Bench.make(drafting(4, 4, page_size=2))
    first = bench.submit([1, 2, 3], max_tokens=11)
    bench.drain()
    bench.submit([1, 2, 3, *first.output_ids], max_tokens=1)
    bench.drain()
    # All but the last token, which has no KV yet.
    assert bench.core.statistics().prefix_cache_hits == 12


def test_the_gaps_of_a_row_are_even() -> None:
    heard: list[tuple[Any, ...]] = []

    class Observer:
        def observe_step(self, num_tokens: int) -> None:
            heard.append(("step", num_tokens))

        def observe_tokens(self, sequence: Sequence, num_tokens: int, now: float) -> None:
            heard.append(("tokens", num_tokens, now))

        def observe_gaps(self, gaps: npt.NDArray[np.float64]) -> None:
            heard.append(("gaps", gaps.tolist()))

    fake = drafting(2, 1)
    bench = Bench(fake, SchedulerCore(make_limits(fake), Observer()))
    bench.submit([1, 2, 3], max_tokens=6)
    for bench.now in (1.0, 4.0, 6.0):
        bench.step()
    assert heard == [
        ("tokens", 1, 1.0),
        ("step", 4),
        ("gaps", [1.0, 1.0, 1.0]),
        ("step", 3),
        ("tokens", 2, 6.0),
        ("step", 2),
    ]


Change = Callable[[wire.StepResult], wire.StepResult]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda r: attrs.evolve(r, tokens=wire.from_ints([4, -1, 6])),
            "comes after one that there was none",
        ),
        (
            lambda r: attrs.evolve(
                r, offsets=wire.from_ints([0, 6]), tokens=wire.from_ints([4] * 6)
            ),
            "6 tokens for slot 0, where 1 to 5 were due",
        ),
        (
            lambda r: attrs.evolve(r, offsets=wire.from_ints([0, 0]), tokens=b""),
            "0 tokens for slot 0, where 1 to 5 were due",
        ),
        (lambda r: attrs.evolve(r, logprobs=r.logprobs[4:]), "without their log-prob"),
        (
            lambda r: attrs.evolve(r, ids_offsets=wire.from_ints([0, 1, 2, 2])),
            "without the log-probabilities",
        ),
    ],
)
def test_a_ragged_result_that_is_wrong_is_refused_whole(change: Change, message: str) -> None:
    bench = Bench.make(drafting(2))
    sequence = bench.submit([1, 2, 3], max_tokens=20, logprobs=0, logprob_token_ids=[7])
    bench.step()
    bench.plan()
    with pytest.raises(WorkerLost, match=message):
        bench.core.on_result(change(bench.results[0]), 0.0)
    assert sequence.output_ids == [3]
    bench.core.check_integrity()


# ---- planted defects


def _all_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the tokens after a stop id, too."""

    def append(sequence: Sequence, tokens: list[int]) -> Any:
        sequence.output_ids.extend(tokens)
        return tuple(tokens), None

    monkeypatch.setattr("trioserve.scheduler.result_processing._append", append)


def _no_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SequenceState, "settle", lambda *_: None)


def _only_first_tokens_may_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(_: ResultProcessor, results: Any) -> Any:
        return np.zeros(len(results.offsets) - 1, dtype=np.bool_)

    monkeypatch.setattr(ResultProcessor, "_may_end_later", never)


def _no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "_grow", lambda _, extra, *__: extra)


@pytest.mark.parametrize(
    "plant", [_all_of_a_row, _no_settling, _only_first_tokens_may_end, _no_pages]
)
def test_planted_defects_are_caught(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> None:
        fake = drafting(*[3] * 40, page_size=2, computes_past_stop=True)
        bench = Bench.make(fake)
        sequences = [
            bench.submit([1, 2, 3], max_tokens=12, stop=[9]),
            bench.submit([2], max_tokens=12, logprobs=0),
            bench.submit([3], max_tokens=12),
        ]
        bench.drain()
        assert all(each.output_ids == reference(fake, each) for each in sequences)

    run()
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        run()
