"""Beam searches: their outputs are those of a search over all continuations, in any schedule."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.scheduling import ABORT, Bench, make_request, reference, reference_beams, worker
from trioserve.protocol import wire
from trioserve.protocol.errors import ContextTooLong, InvalidRequest
from trioserve.protocol.sampling import SamplingParams
from trioserve.requests.request import FinishReason, Request, State
from trioserve.scheduler.beam_search import BeamSearch, Continuations
from trioserve.testing import FakeWorker

VOCAB = 12

searches = st.integers(1, 5).flatmap(
    lambda width: st.fixed_dictionaries(
        {
            "prompt": st.lists(st.integers(0, 3), min_size=1, max_size=9),
            "max_tokens": st.integers(1, 9),
            "stop": st.lists(st.integers(0, VOCAB - 1), max_size=2, unique=True).map(sorted),
            "beam_width": st.just(width),
            "n": st.integers(1, width),
            "length_penalty": st.sampled_from([0.0, 1.0, 0.6, 2.0, -1.0]),
            "early_stopping": st.sampled_from([False, True, "never"]),
            "min_tokens": st.sampled_from([0, 0, 1]),
            "logprobs": st.sampled_from([None, None, 2]),
        }
    )
)
others = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(0, 3), min_size=1, max_size=9),
        "max_tokens": st.integers(1, 9),
        "seed": st.integers(0, 3),
    }
)


def submit(bench: Bench, **asked: Any) -> Request:
    request = make_request(**asked)
    bench.core.submit(request, bench.now)
    return request


def check_outputs(fake: FakeWorker, request: Request) -> None:
    """Assert that the outputs of ``request`` are those of the reference."""
    expected = reference_beams(fake, request, request.sequences[0].max_tokens)
    for sequence, beam in zip(request.sequences, expected, strict=True):
        assert tuple(sequence.output_ids) == beam.tokens
        assert sequence.finish is not None
        assert sequence.finish.beam_logprob == float(beam.total)
        is_stop = sequence.sampler.is_stop(beam.tokens[-1], len(beam.tokens))
        reason = FinishReason.STOP if is_stop else FinishReason.LENGTH
        assert sequence.finish.reason is reason
    assert all(each.state is State.FINISHED for each in request.all_sequences)


@given(
    asked=st.lists(searches, min_size=1, max_size=3),
    beside=st.lists(others, max_size=3),
    options=st.fixed_dictionaries(
        {
            "num_pages": st.integers(10, 40),
            "page_size": st.integers(1, 4),
            "max_num_batched_tokens": st.integers(3, 20),
            "max_num_seqs": st.integers(1, 8),
            "num_host_pages": st.sampled_from([0, 6]),
            "computes_past_stop": st.booleans(),
        }
    ),
    depth=st.integers(1, 3),
    caches=st.booleans(),
)
def test_outputs_are_those_of_a_search_over_everything(
    asked: list[dict[str, Any]],
    beside: list[dict[str, Any]],
    options: dict[str, Any],
    depth: int,
    caches: bool,
) -> None:
    fake = FakeWorker(vocab_size=VOCAB, **options)
    bench = Bench.make(fake, max_plans_in_flight=depth, enable_prefix_caching=caches)
    requests: list[Request] = []
    sequences = []
    for search in asked:
        try:
            requests.append(submit(bench, **search))
        except InvalidRequest:
            continue
    for other in beside:
        try:
            sequences.append(bench.submit(**other))
        except InvalidRequest:
            continue
    bench.drain()
    for request in requests:
        check_outputs(fake, request)
    for sequence in sequences:
        assert sequence.output_ids == reference(fake, sequence)


def test_equal_scores_are_ordered_by_beam_then_token() -> None:
    def found(*tokens: int) -> Continuations:
        return Continuations(np.array(tokens, np.int32), np.full(len(tokens), -1, np.float32))

    params = SamplingParams(max_tokens=3, n=4, beam_width=4)
    search = BeamSearch(params=params, max_tokens=3, ending=lambda output: None)
    search.choose([found(7, 3, 9, 5)])
    assert [beam.tokens for beam in search.beams] == [[3], [5], [7], [9]]
    search.choose([found(8, 2), found(6, 1), found(4, 0), found(2, 1)])
    assert [beam.tokens for beam in search.beams] == [[3, 2], [3, 8], [5, 1], [5, 6]]
    assert [beam.parent for beam in search.beams] == [0, 0, 1, 1]


def test_a_fork_shares_full_pages_and_copies_the_last() -> None:
    fake = worker(vocab_size=VOCAB, num_pages=32)
    bench = Bench.make(fake)
    request = submit(bench, prompt=[1] * 10, max_tokens=6, beam_width=3)
    bench.drain()
    check_outputs(fake, request)
    forked = [slot for plan in bench.plans[1:] for slot in plan.opened if slot.computed >= 10]
    assert forked
    first = bench.plans[0].opened[0]
    assert all(each.pages[:8] == first.pages[:8] for each in forked), "a full page isn't shared"
    copies = [wire.ints(plan.copies).tolist() for plan in bench.plans[1:]]
    assert copies[0] == [2, 3, 2, 4], "the page of tokens 8 and 9 is copied for two forks"
    prefilled = sum(count for plan in bench.plans for _, count in bench.rows(plan) if count > 1)
    assert prefilled == 10, "a token was computed twice"


def test_the_log_probabilities_are_those_of_the_scores() -> None:
    fake = worker(vocab_size=VOCAB)
    bench = Bench.make(fake)
    submit(bench, prompt=[1, 2], max_tokens=4, beam_width=2, n=2, logprobs=1)
    bench.drain()
    for output in bench.outputs:
        assert output.finish is not None
        assert output.logprobs is not None
        assert [each.token_id for each in output.logprobs] == list(output.token_ids)
        total = output.finish.beam_logprob
        assert sum(each.logprob for each in output.logprobs) == pytest.approx(total)
        assert all(len(each.top) == 1 for each in output.logprobs)


def test_an_aborted_search_leaves_nothing() -> None:
    for steps in range(6):
        bench = Bench.make(worker(vocab_size=VOCAB))
        request = submit(bench, prompt=[1] * 6, max_tokens=8, beam_width=3, n=2)
        for _ in range(steps):
            bench.step()
        for sequence in reversed(request.sequences):
            bench.core.abort(sequence, ABORT)
        bench.drain()
        assert bench.core.statistics().pages_held == 0
        assert bench.core.num_unfinished == 0


def test_a_search_that_finds_too_few_outputs_names_n() -> None:
    bench = Bench.make(worker(vocab_size=VOCAB))
    submit(bench, prompt=[1], max_tokens=1, beam_width=3, n=3, allowed_token_ids=[4, 5])
    bench.drain()
    finishes = [output.finish for output in bench.outputs]
    assert [isinstance(each and each.error, InvalidRequest) for each in finishes] == [True] * 3
    assert "leaves 2 outputs" in str(finishes[0] and finishes[0].error)


def test_beams_that_can_never_run_are_refused() -> None:
    bench = Bench.make(worker(num_pages=8, max_num_seqs=4))
    with pytest.raises(InvalidRequest, match=r"beam_width must be at most 4 \(--max-num-seqs\)"):
        submit(bench, prompt=[1], beam_width=5)
    with pytest.raises(ContextTooLong, match="holds 8 for each of 4 beams"):
        submit(bench, prompt=[1], max_tokens=9, beam_width=4)


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_searches_that_give_way_to_each_other_come_to_an_end(policy: str) -> None:
    """Beams run three or four at a time, so a search may wait for a beam that can't enter."""
    for seed in range(100):
        numbers = random.Random(seed)
        sizes = {
            "page_size": numbers.choice((2, 4)),
            "max_num_batched_tokens": numbers.choice((3, 4)),
        }
        fake = worker(vocab_size=VOCAB, num_pages=40, max_num_seqs=8, **sizes)
        bench = Bench.make(fake, scheduling_policy=policy)
        requests = []
        for _ in range(numbers.randint(2, 3)):
            asked = {
                "prompt": [numbers.randint(0, 3) for _ in range(numbers.randint(1, 14))],
                "max_tokens": numbers.randint(2, 12),
                "beam_width": numbers.randint(2, 3),
                "early_stopping": "never",
            }
            requests.append(submit(bench, **asked))
            for _ in range(numbers.randint(0, 4)):
                if bench.plan() is not None or bench.results:
                    bench.step()
        bench.drain()
        for request in requests:
            check_outputs(fake, request)
