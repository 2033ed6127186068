"""Hidden states and logits: each row once, however its token came to be computed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest

from tests.support.scheduling import (
    ABORT,
    Bench,
    reference,
    reference_tensors,
    worker,
)
from trioserve.protocol import wire
from trioserve.protocol.errors import InvalidRequest, WorkerLost
from trioserve.requests.request import Sequence
from trioserve.scheduler import tensor_pieces
from trioserve.scheduler.moving import movable, take_in, take_out
from trioserve.testing import FakeWorker, hashed_token

PAGE = 4
PROMPT = [number % 11 for number in range(22)]
EVERYTHING: dict[str, Any] = {
    "return_hidden_states": True,
    "return_context_logits": True,
    "return_generation_logits": True,
}
PROMPTS_OWN = {"prompt_hidden_states", "context_logits"}


def hashing(**options: Any) -> FakeWorker:
    return worker(token=hashed_token(256), **options)


def opened(bench: Bench) -> list[wire.OpenSlot]:
    return list(itertools.chain.from_iterable(plan.opened for plan in bench.plans))


def arrays(sequence: Sequence) -> dict[str, Any]:
    tensors = sequence.request.tensors
    assert tensors is not None
    return tensors.of_prompt() | tensors.of_output(sequence.index, len(sequence.output_ids))


def assert_returned(bench: Bench, sequence: Sequence, names: set[str]) -> None:
    found, due = arrays(sequence), reference_tensors(bench.worker, sequence)
    assert found.keys() == names
    for name in names:
        np.testing.assert_array_equal(found[name], due[name], err_msg=name)


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        (EVERYTHING, {*PROMPTS_OWN, "hidden_states", "generation_logits"}),
        ({"return_hidden_states": "last"}, {"hidden_states"}),
        ({"return_hidden_states": "all"}, {"prompt_hidden_states", "hidden_states"}),
        ({"return_context_logits": True}, {"context_logits"}),
        ({"return_generation_logits": True}, {"generation_logits"}),
    ],
)
@pytest.mark.parametrize("max_tokens", [0, 1, 8])
@pytest.mark.parametrize(("budget", "depth"), [(512, 1), (7, 2), (2, 3)])
def test_each_row_comes_once(
    asked: dict[str, Any], names: set[str], max_tokens: int, budget: int, depth: int
) -> None:
    bench = Bench.make(hashing(max_num_batched_tokens=budget), max_plans_in_flight=depth)
    sequence = bench.submit(PROMPT, max_tokens=max_tokens, **asked)
    plain = bench.submit(PROMPT[:9], max_tokens=5)
    bench.drain()
    assert len(sequence.output_ids) == max_tokens
    assert_returned(bench, sequence, names)
    assert plain.request.tensors is None


@pytest.mark.parametrize("budget", [512, 7])
def test_the_first_of_several_outputs_gives_the_prompts_rows(budget: int) -> None:
    bench = Bench.make(hashing(max_num_batched_tokens=budget), max_plans_in_flight=2)
    sequences = bench.submit_all(PROMPT, n=3, **EVERYTHING)
    bench.drain()
    for sequence in sequences:
        assert_returned(bench, sequence, {*PROMPTS_OWN, "hidden_states", "generation_logits"})
    froms = [(each.states_from, each.context_logits_from) for each in opened(bench)]
    assert froms == [(0, 0), (len(PROMPT) - 1, -1), (len(PROMPT) - 1, -1)]


@pytest.mark.parametrize("num_steps", range(1, 5))
def test_another_output_leads_if_the_first_is_aborted(num_steps: int) -> None:
    bench = Bench.make(hashing(max_num_batched_tokens=7))
    sequences = bench.submit_all(PROMPT, n=2, **EVERYTHING)
    for _ in range(num_steps):
        bench.step()
    bench.core.abort(sequences[0], ABORT)
    bench.drain()
    assert_returned(bench, sequences[1], {*PROMPTS_OWN, "hidden_states", "generation_logits"})


@pytest.mark.parametrize(
    ("asked", "cached"),
    [
        ({"return_hidden_states": "all"}, 0),
        ({"return_context_logits": True}, 0),
        ({"return_hidden_states": "last"}, 5 * PAGE),
        ({"return_generation_logits": True}, 5 * PAGE),
    ],
)
def test_a_prefix_hit_ends_before_the_first_row(asked: dict[str, Any], cached: int) -> None:
    bench = Bench.make(hashing())
    bench.submit(PROMPT, max_tokens=1)
    bench.drain()
    sequence = bench.submit(PROMPT, **asked)
    bench.drain()
    assert sequence.request.num_cached_tokens == cached
    assert_returned(bench, sequence, set(arrays(sequence)))


@pytest.mark.parametrize("depth", [1, 2])
def test_preempted_sequences_give_no_row_twice(depth: int) -> None:
    bench = Bench.make(hashing(num_pages=14), max_plans_in_flight=depth)
    sequences = [bench.submit([number] * 9, max_tokens=20, **EVERYTHING) for number in range(3)]
    bench.drain()
    assert bench.core.counters.num_preemptions > 0
    for sequence in sequences:
        assert_returned(bench, sequence, {*PROMPTS_OWN, "hidden_states", "generation_logits"})


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_steps", range(1, 12, 2))
def test_a_worker_that_dies_in_the_midst_doubles_and_loses_nothing(
    num_steps: int, depth: int
) -> None:
    fake = hashing(max_num_batched_tokens=5)
    bench = Bench.make(fake, max_plans_in_flight=depth)
    sequences = bench.submit_all(PROMPT, n=2, **EVERYTHING)
    for _ in range(num_steps):
        bench.step()
    before = arrays(sequences[0])
    bench.replace_worker(hashing(max_num_batched_tokens=5), max_plans_in_flight=depth)
    bench.drain()
    again = opened(bench)[0]
    num_states = len(before["prompt_hidden_states"])
    next_row = num_states if num_states < len(PROMPT) else wire.ints(again.tokens).size - 1
    assert again.states_from == next_row
    for sequence in sequences:
        assert sequence.output_ids == reference(fake, sequence)
        assert_returned(bench, sequence, {*PROMPTS_OWN, "hidden_states", "generation_logits"})


@pytest.mark.parametrize("num_steps", [1, 2, 6])
def test_a_request_goes_on_elsewhere_with_the_rows_that_are_missing(num_steps: int) -> None:
    here, there = (Bench.make(hashing(max_num_batched_tokens=9)) for _ in range(2))
    sequences = here.submit_all(PROMPT, n=2, **EVERYTHING)
    for _ in range(num_steps):
        here.step()
    here.core.retract_running()
    (request,) = movable(here.core)
    take_in(there.core, take_out(here.core, request))
    here.drain()
    there.drain()
    for sequence in sequences:
        assert_returned(there, sequence, {*PROMPTS_OWN, "hidden_states", "generation_logits"})


def test_tokens_that_stop_strings_cut_off_have_no_rows() -> None:
    bench = Bench.make(hashing())
    sequence = bench.submit(PROMPT, **EVERYTHING)
    bench.drain()
    tensors = sequence.request.tensors
    assert tensors is not None
    cut = tensors.of_output(0, 3)
    due = reference_tensors(bench.worker, sequence)
    for name in ("hidden_states", "generation_logits"):
        np.testing.assert_array_equal(cut[name], due[name][:3])


def test_no_drafts_are_made_beside_those_that_have_some() -> None:
    fake = hashing(max_row_tokens=4)
    fake.accepted = lambda _context: 2
    bench = Bench.make(fake)
    sequence, drafted = bench.submit(PROMPT, **EVERYTHING), bench.submit(PROMPT[:5])
    bench.drain()
    assert_returned(bench, sequence, {*PROMPTS_OWN, "hidden_states", "generation_logits"})
    assert sequence.num_draft_tokens == 0
    assert drafted.num_draft_tokens > 0


# ---- what is refused


@pytest.mark.parametrize(
    ("asked", "num_bytes", "message"),
    [
        ({"return_hidden_states": "last"}, 2 * 8 * 8, "return_hidden_states asks for up to 128 "),
        ({"return_hidden_states": "all"}, (22 + 2 * 8) * 8, "return_hidden_states asks for up to "),
        (
            {"return_context_logits": True, "return_hidden_states": "last"},
            22 * 1024 + 128,
            f"return_context_logits asks for up to {22 * 1024} bytes of arrays, {22 * 1024 + 128} "
            "with return_hidden_states: at most",
        ),
        ({"return_generation_logits": True}, 16 * 1024, "return_generation_logits asks for up to "),
    ],
)
def test_more_bytes_than_the_bound_are_refused_by_name(
    asked: dict[str, Any], num_bytes: int, message: str
) -> None:
    bench = Bench.make(hashing(), max_output_tensor_bytes=num_bytes - 1)
    with pytest.raises(InvalidRequest, match=message) as caught:
        bench.submit_all(PROMPT, n=2, **asked)
    assert f"at most {num_bytes - 1} are returned (--max-output-tensor-bytes)" in str(caught.value)
    assert caught.value.param == message.split()[0]
    assert bench.core.num_waiting == 0
    bench = Bench.make(hashing(), max_output_tensor_bytes=num_bytes)
    bench.submit_all(PROMPT, n=2, **asked)
    bench.drain()


def test_a_worker_without_arrays_refuses_them_by_name() -> None:
    bench = Bench.make(hashing(), hidden_size=0)
    with pytest.raises(InvalidRequest, match="return_context_logits isn't served") as caught:
        bench.submit(PROMPT, return_context_logits=True)
    assert caught.value.param == "return_context_logits"


@pytest.mark.parametrize("name", EVERYTHING)
def test_beams_return_none(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} must be left out with beam_width") as caught:
        Bench.make(hashing()).submit(PROMPT, beam_width=2, **{name: EVERYTHING[name]})
    assert caught.value.param == name


def test_requests_run_together_as_far_as_their_rows_fit_a_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = {"return_generation_logits": True, "max_tokens": 8}
    monkeypatch.setattr(tensor_pieces, "MAX_RUNNING_BYTES", 2 * 8 * 1024)
    bench = Bench.make(hashing())
    large = [bench.submit([number] * 6, **own) for number in range(4)]
    plain = bench.submit(PROMPT)
    bench.step()
    running = [each.sequence for each in bench.core.running]
    assert running == [*large[:2], plain]
    bench.drain()
    for sequence in large:
        assert_returned(bench, sequence, {"generation_logits"})


# ---- nonsense

Change = Callable[[wire.StepResult], wire.StepResult]


def with_piece(**changes: Any) -> Change:
    def change(result: wire.StepResult) -> wire.StepResult:
        first, *others = result.tensors
        return attrs.evolve(result, tensors=[attrs.evolve(first, **changes), *others])

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: attrs.evolve(r, tensors=[]), "hidden_states end before position 21, .* 22"),
        (lambda r: attrs.evolve(r, tensors=r.tensors * 2), "twice"),
        (with_piece(slot=1), "hidden_states end before position 21"),
        (with_piece(name="nothing"), "hidden_states end before position 21"),
        (with_piece(start=-1), "hidden_states begin at -1"),
        (with_piece(start=22), "hidden_states 21 to 22 are missing"),
        (with_piece(rows=wire.from_floats([0.0] * 3)), "are wrong"),
        (with_piece(rows=b"abc"), "are wrong"),
        (with_piece(rows=b""), "hidden_states end before position 21"),
        (lambda r: attrs.evolve(r, tensors=[*r.tensors, _piece(slot=3)]), "weren't asked for"),
        (
            lambda r: attrs.evolve(r, tensors=[*r.tensors, _piece(name="context_logits")]),
            "no context_logits were asked for",
        ),
    ],
)
def test_rows_that_do_not_fit_are_refused_whole(change: Change, message: str) -> None:
    bench = Bench.make(hashing())
    sequence = bench.submit(PROMPT, return_hidden_states="last")
    bench.plan()
    with pytest.raises(WorkerLost, match=message):
        bench.core.on_result(change(bench.results[0]), 0.0)
    assert sequence.output_ids == []
    assert arrays(sequence)["hidden_states"].shape == (0, 2)
    bench.core.check_integrity()


def _piece(slot: int = 0, name: str = "hidden_states") -> wire.TensorPiece:
    return wire.TensorPiece(slot=slot, name=name, start=0, rows=wire.from_floats([0.0] * 256))
