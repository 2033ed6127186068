"""Log-probabilities of prompts: each position once, however the prompt came to be computed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from tests.support.scheduling import Bench, reference, reference_logprobs, worker
from trioserve.protocol import wire
from trioserve.protocol.errors import InvalidRequest, WorkerLost
from trioserve.requests.logprobs import PromptLogprobs
from trioserve.requests.request import Sequence
from trioserve.requests.stream import TokenLogprob
from trioserve.scheduler import limits
from trioserve.testing import FakeWorker, hashed_token
from trioserve.testing.fake_model import fake_logprobs

PAGE = 4
PROMPT = [number % 11 for number in range(22)]


def hashing(**options: Any) -> FakeWorker:
    return worker(token=hashed_token(256), **options)


def entries(sequence: Sequence) -> list[TokenLogprob]:
    assert sequence.request.prompt_logprobs is not None
    return sequence.request.prompt_logprobs.entries(sequence.request.prompt_ids)


def opened(bench: Bench) -> list[wire.OpenSlot]:
    return list(itertools.chain.from_iterable(plan.opened for plan in bench.plans))


def assert_told(bench: Bench, sequence: Sequence) -> None:
    told = entries(sequence)
    assert told == reference_logprobs(bench.worker, sequence.request)
    assert [entry.token_id for entry in told] == PROMPT[len(PROMPT) - len(told) :]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("budget", [512, 7, 2])
@pytest.mark.parametrize("n", [1, 3])
def test_each_position_comes_once(n: int, budget: int, depth: int) -> None:
    bench = Bench.make(hashing(max_num_batched_tokens=budget), max_plans_in_flight=depth)
    params = {"prompt_logprobs": 3, "logprobs": 0, "logprob_token_ids": [9, 2]}
    sequence, *_ = bench.submit_all(PROMPT, n=n, **params)
    bench.drain()
    assert_told(bench, sequence)
    assert len(entries(sequence)) == len(PROMPT) - 1
    assert all(len(entry.top) == 3 and len(entry.asked) == 2 for entry in entries(sequence))
    reporting = [slot for slot in opened(bench) if slot.prompt_logprobs_from != -1]
    assert [slot.sampler.sequence_index for slot in reporting] == [0], "others report, too"


@pytest.mark.parametrize(
    ("start", "cached"),
    [(0, 0), (1, 0), (PAGE, 0), (PAGE + 1, PAGE), (3 * PAGE, 2 * PAGE), (len(PROMPT), 5 * PAGE)],
)
def test_a_prefix_hit_ends_before_the_first_position_asked_for(start: int, cached: int) -> None:
    bench = Bench.make(hashing())
    bench.submit(PROMPT, max_tokens=1)
    bench.drain()
    sequence = bench.submit(PROMPT, prompt_logprobs=1, prompt_logprobs_start=start)
    plain = bench.submit(PROMPT)
    bench.drain()
    assert sequence.request.num_cached_tokens == cached
    assert plain.request.num_cached_tokens == 5 * PAGE
    assert_told(bench, sequence)
    assert len(entries(sequence)) == len(PROMPT) - max(start, 1)


def test_siblings_use_the_whole_prefix_that_their_leader_could_not() -> None:
    bench = Bench.make(hashing())
    bench.submit(PROMPT, max_tokens=1)
    bench.drain()
    bench.plans.clear()
    sequences = bench.submit_all(PROMPT, n=3, prompt_logprobs=1)
    bench.drain()
    assert [slot.computed for slot in opened(bench)] == [0, 5 * PAGE, 5 * PAGE]
    assert_told(bench, sequences[0])
    assert all(each.output_ids == reference(bench.worker, each) for each in sequences)


def test_a_prompt_of_one_token_has_none() -> None:
    bench = Bench.make(hashing())
    sequence = bench.submit([5], prompt_logprobs=2)
    bench.drain()
    assert entries(sequence) == []


def test_a_start_past_the_prompt_is_refused_by_name() -> None:
    bench = Bench.make(hashing())
    with pytest.raises(InvalidRequest, match=r"prompt_logprobs_start is 23.*22 tokens") as caught:
        bench.submit(PROMPT, prompt_logprobs=1, prompt_logprobs_start=len(PROMPT) + 1)
    assert caught.value.param == "prompt_logprobs_start"
    assert bench.core.num_waiting == 0


def test_more_than_an_answer_may_hold_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {"prompt_logprobs": 2, "logprob_token_ids": [7], "n": 3}
    asked |= {"prompt_logprobs_start": 2, "logprobs": 0}
    count = (len(PROMPT) - 2) * 4 * 3
    bench = Bench.make(hashing())
    monkeypatch.setattr(limits, "MAX_PROMPT_LOGPROBS", count - 1)
    message = f"{count} log-prob.* 4 at each of 20 .* 3 outputs: at most {count - 1} "
    with pytest.raises(InvalidRequest, match=message) as caught:
        bench.submit_all(PROMPT, **asked)
    assert caught.value.param == "prompt_logprobs"
    assert bench.core.num_waiting == 0
    monkeypatch.setattr(limits, "MAX_PROMPT_LOGPROBS", count)
    bench.submit_all(PROMPT, **asked)
    bench.drain()


def test_more_alternatives_than_tokens_are_as_many_as_there_are() -> None:
    bench = Bench.make(worker(vocab_size=16, token=hashed_token(16)))
    sequence = bench.submit(PROMPT, prompt_logprobs=20)
    bench.drain()
    assert all(len(entry.top) == 16 for entry in entries(sequence))
    assert_told(bench, sequence)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_steps", range(1, 8))
def test_a_worker_that_dies_in_the_midst_doubles_and_loses_nothing(
    num_steps: int, depth: int
) -> None:
    fake = hashing(max_num_batched_tokens=5)
    bench = Bench.make(fake, max_plans_in_flight=depth)
    sequences = bench.submit_all(PROMPT, n=2, prompt_logprobs=1, prompt_logprobs_start=3)
    for _ in range(num_steps):
        bench.step()
    told = entries(sequences[0])
    bench.replace_worker(hashing(max_num_batched_tokens=5), max_plans_in_flight=depth)
    bench.drain()
    again = opened(bench)[0]
    complete = len(told) == len(PROMPT) - 3
    assert again.prompt_logprobs_from == (-1 if complete else 3 + len(told))
    assert_told(bench, sequences[0])
    assert entries(sequences[0])[: len(told)] == told
    assert all(each.output_ids == reference(fake, each) for each in sequences)


def test_named_tokens_come_with_each_token_of_the_output() -> None:
    bench = Bench.make(hashing())
    named = bench.submit(PROMPT, logprobs=1, logprob_token_ids=[7, 7, 3], max_tokens=3)
    bench.submit(PROMPT, logprobs=1, max_tokens=3)
    bench.drain()
    context = list(PROMPT)
    for output in bench.outputs:
        assert output.logprobs is not None
        (entry,) = output.logprobs
        if output.sequence is not named:
            assert entry.asked == ()
            continue
        expected = fake_logprobs(context, 256)[[7, 7, 3]].tolist()
        assert entry.asked == tuple((t, p, "") for t, p in zip([7, 7, 3], expected, strict=True))
        context.append(entry.token_id)


# ---- nonsense

Change = Callable[[wire.StepResult], wire.StepResult]


def with_piece(**changes: Any) -> Change:
    def change(result: wire.StepResult) -> wire.StepResult:
        (piece,) = result.prompts
        return attrs.evolve(result, prompts=[attrs.evolve(piece, **changes)])

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: attrs.evolve(r, prompts=[]), "lacks the log-probabilities of prompt tokens"),
        (lambda r: attrs.evolve(r, prompts=r.prompts * 2), "not asked for"),
        (with_piece(slot=1), "not asked for"),
        (with_piece(start=2), "tokens 2 to 10, where 1 to 9 were due"),
        (with_piece(start=0), "tokens 0 to 8, where 1 to 9 were due"),
        (with_piece(logprobs=wire.from_floats([0.0] * 6)), "columns have"),
        (with_piece(logprobs=b"abc"), "are wrong"),
        (with_piece(ranks=wire.from_ints([1] * 9)), "columns have"),
        (with_piece(top_ids=b""), "columns have"),
        (with_piece(top_logprobs=wire.from_floats([0.0] * 7)), "columns have"),
        (with_piece(ids_logprobs=wire.from_floats([0.0] * 7)), "columns have"),
    ],
)
def test_log_probabilities_that_do_not_fit_are_refused_whole(change: Change, message: str) -> None:
    bench = Bench.make(hashing(max_num_batched_tokens=8))
    sequence = bench.submit(PROMPT, prompt_logprobs=2)
    bench.plan()
    with pytest.raises(WorkerLost, match=message):
        bench.core.on_result(change(bench.results[0]), 0.0)
    assert entries(sequence) == []
    bench.core.check_integrity()


@pytest.mark.parametrize(
    "change",
    [
        lambda r: attrs.evolve(r, ids_offsets=b"", ids_logprobs=b""),
        lambda r: attrs.evolve(r, ids_offsets=wire.from_ints([0])),
        lambda r: attrs.evolve(r, ids_offsets=wire.from_ints([0, 1])),
        lambda r: attrs.evolve(r, ids_offsets=wire.from_ints([-2, 0])),
        lambda r: attrs.evolve(r, ids_offsets=wire.from_ints([1, 3])),
    ],
)
def test_named_tokens_without_log_probabilities_are_refused(change: Change) -> None:
    bench = Bench.make(hashing())
    sequence = bench.submit([5], logprobs=0, logprob_token_ids=[1, 2])
    bench.plan()
    with pytest.raises(WorkerLost, match="of the 2 tokens that were named"):
        bench.core.on_result(change(bench.results[0]), 0.0)
    assert sequence.output_ids == []


def test_pieces_leave_no_gap() -> None:
    logprobs = PromptLogprobs(start=2, num_top=0)

    def piece(start: int, *values: float) -> wire.PromptPiece:
        ranks = wire.from_ints([1] * len(values))
        return wire.PromptPiece(slot=0, start=start, logprobs=wire.from_floats(values), ranks=ranks)

    with pytest.raises(ValueError, match="prompt tokens 2 to 3 are missing"):
        logprobs.add(piece(3, -1.0))
    logprobs.add(piece(2, -2.0, -3.0))
    logprobs.add(piece(2, -8.0, -8.0))
    logprobs.add(piece(3, -8.0, -4.0))
    assert logprobs.stop == 5
    assert [entry.logprob for entry in logprobs.entries(list(range(9)))] == [-2.0, -3.0, -4.0]
