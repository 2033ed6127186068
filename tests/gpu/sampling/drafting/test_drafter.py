"""Drafts of rows: what followed before, no more than a row has room for, and long prompts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from gpu.sampling.drafting import drafter as drafter_module
from gpu.sampling.drafting import sources as sources_module
from gpu.sampling.drafting.acceptance import Acceptance
from gpu.sampling.drafting.drafter import Drafter
from gpu.sampling.drafting.pause import SHORTEST
from gpu.sampling.drafting.sources import AskedDraft, Draft, DraftKind
from gpu.sampling.drafting.step_times import StepTimes
from gpu.sampling.drawn import Drawn
from gpu.slots import Row, Slot
from trioserve.protocol.sampling import SamplerParams
from trioserve.protocol.speculation import SpeculativeConfig
from trioserve.protocol.wire import from_ints


def make_row(
    number: int, tokens: Sequence[int], room: int = 8, **sampler: bool | bytes | str
) -> Row:
    buffer = np.array(tokens, dtype=np.int32)
    slot = Slot(
        number=number,
        generation=0,
        prompt_length=1,
        computed=len(tokens) - 1,
        sampler=SamplerParams(**sampler),  # type: ignore[arg-type]
        buffer=buffer,
        length=len(tokens),
    )
    return Row(slot=slot, start=len(tokens) - 1, count=1, samples=True, drafts=room)


def make_drafter(**fields: bool | int | str) -> Drafter:
    """Return a drafter on a machine where tokens cost nothing, unless ``fields`` say otherwise."""
    config = SpeculativeConfig(**{"adaptive": False, **fields})  # type: ignore[arg-type]
    return Drafter(config, StepTimes({1: 1.0, 8: 1.0}))


def propose(drafter: Drafter, *rows: Row) -> dict[int, Draft]:
    """Open the rows' slots, and return the drafts for them."""
    for row in rows:
        drafter.open(row.slot)
    return drafter.add_drafts(rows).drafts


@pytest.mark.parametrize("method", ["suffix", "ngram"])
def test_what_followed_is_drafted(method: str) -> None:
    drafter = make_drafter(method=method)
    row = make_row(0, [1, 2, 3, 4, 5, 9, 1, 2, 3])
    assert propose(drafter, row)[0].tokens == [4, 5, 9, 1, 2, 3, 4, 5]
    assert propose(drafter, make_row(1, [1, 2, 3, 4, 5, 9, 1, 2, 3], room=2))[0].tokens == [4, 5]


def test_rows_without_room_a_match_or_the_wish_have_no_drafts() -> None:
    repeated = [1, 2, 3, 1, 2]
    rows = [
        make_row(0, repeated, room=0),
        make_row(1, [1, 2, 3, 4, 5]),
        make_row(2, repeated, speculative=False),
        make_row(3, repeated),
    ]
    assert list(propose(make_drafter(), *rows)) == [3]
    assert propose(make_drafter(prompt_lookup_min=3), *rows) == {}


def test_a_slot_that_is_opened_again_is_indexed_anew() -> None:
    drafter = make_drafter()
    assert propose(drafter, make_row(0, [1, 2, 3, 1, 2]))[0].tokens[0] == 3
    assert propose(drafter, make_row(0, [7, 8, 9, 7, 8]))[0].tokens[0] == 9


def test_a_long_prompt_is_indexed_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter_module, "MAX_INDEXED_AT_ONCE", 10)
    drafter = make_drafter()
    rows = [make_row(0, [*range(20), 0, 1]), make_row(1, [1, 2, 1, 2])]
    for row in rows:
        drafter.open(row.slot)
    assert [sorted(drafter.add_drafts(rows).drafts) for _ in range(4)] == [[], [], [0, 1], [0, 1]]


def test_of_a_very_long_sequence_the_last_tokens_are_indexed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sources_module, "MAX_INDEXED", 6)
    drafter = make_drafter()
    found = propose(drafter, make_row(0, [5, 6, 8, 1, 2, 3, 4, 1, 2]))
    assert found[0].tokens[:2] == [3, 4]
    assert propose(drafter, make_row(1, [5, 6, 8, 1, 2, 3, 4, 5, 6])) == {}


def test_drafts_that_are_never_accepted_are_given_up() -> None:
    drafter = Drafter(SpeculativeConfig(), StepTimes({1: 1.0, 8: 1.5}))
    row = make_row(0, [1, 2, 3, 1, 2])
    drafter.open(row.slot)
    tried = 0
    for _ in range(100):
        step = drafter.add_drafts([row])
        tried += bool(step.drafts)
        refused = Drawn(tokens=np.zeros(1, dtype=np.int32), counts=np.ones(1, dtype=np.int64))
        drafter.learn(step, refused, 1.0)
    assert 0 < tried < 60


def hopeful_drafter(monkeypatch: pytest.MonkeyPatch) -> tuple[Drafter, list[Row]]:
    """Return a drafter that expects its drafts to be accepted, and sixteen rows to draft for."""
    monkeypatch.setattr(Acceptance, "_estimate", lambda *_: 0.99)
    drafter = Drafter(SpeculativeConfig(), StepTimes({1: 1.0, 16: 1.0, 144: 3.0}))
    rows = [make_row(i, [1, 2, 3, 4, 1, 2]) for i in range(16)]
    for row in rows:
        drafter.open(row.slot)
    return drafter, rows


@pytest.mark.parametrize(("num_accepted", "expected"), [(0, 80), (4, 400)])
def test_there_are_pauses_if_drafts_cost_more_than_they_save(
    num_accepted: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is expected of them: here all seem to be worth it."""
    drafter, rows = hopeful_drafter(monkeypatch)
    tried = 0
    for _ in range(400):
        step = drafter.add_drafts(rows)
        tried += bool(step.drafts)
        counts = np.ones(16, dtype=np.int64)
        counts[list(step.drafts)] += num_accepted
        drawn = Drawn(tokens=np.zeros(counts.sum(), dtype=np.int32), counts=counts)
        num_drafts = sum(row.drafts for row in step.rows)
        drafter.learn(step, drawn, 1.0 + num_drafts / 64)
    assert tried == expected


def test_a_pause_lasts_though_steps_have_other_shares_of_the_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the plans of several stages do."""
    drafter, rows = hopeful_drafter(monkeypatch)
    tried = []
    for number in range(80):
        step = drafter.add_drafts(rows[5:] if number % 2 else rows[:5])
        count = len(step.rows)
        drawn = Drawn(tokens=np.zeros(count, np.int32), counts=np.ones(count, np.int64))
        drafter.learn(step, drawn, 1.0 + sum(row.drafts for row in step.rows) / 64)
        tried.append(bool(step.drafts))
    first = tried.index(False)
    assert not any(tried[first : first + SHORTEST])
    assert any(tried[first + SHORTEST :])


def test_of_many_slots_some_are_tried_and_those_that_accept_always() -> None:
    rows = [make_row(i, [1, 2, 3, 4, 1, 2]) for i in range(20)]
    drafter = make_drafter()
    for row in rows:
        drafter.open(row.slot)
    tried = []
    for _ in range(3):
        step = drafter.add_drafts(rows)
        tried.append(sorted(step.drafts))
        counts = np.ones(20, dtype=np.int64)
        counts[[i for i in step.drafts if i == 4]] = 2
        drawn = Drawn(tokens=np.zeros(20, dtype=np.int32), counts=counts)
        drafter.learn(step, drawn, 1.0)
    assert tried == [[*range(8)], [4, *range(8, 16)], [0, 1, 2, 3, 4, *range(16, 20)]]
    drafter.close(4)
    assert len(drafter.add_drafts(rows[8:]).drafts) == 8


def test_a_step_has_room_for_so_many_drafts() -> None:
    rows = [make_row(i, [1, 2, 3, 4, 1, 2]) for i in range(3)]
    drafter = make_drafter()
    for row in rows:
        drafter.open(row.slot)
    step = drafter.add_drafts(rows, 10)
    assert [row.drafts for row in step.rows] == [8, 2, 0]
    assert [len(step.drafts[i].tokens) for i in step.drafts] == [8, 2]
    assert drafter.add_drafts(rows, 0).drafts == {}


def predicted(*tokens: int) -> bytes:
    return from_ints(tokens)


def test_a_prediction_is_drafted_from_its_beginning_and_where_it_is_met_again() -> None:
    drafter, prediction = make_drafter(), predicted(5, 6, 7, 8)
    found = propose(
        drafter,
        make_row(0, [1], prediction=prediction),
        make_row(1, [1, 5, 6], prediction=prediction),
        make_row(2, [1, 9, 7], prediction=prediction),
        make_row(3, [1, 9, 2], prediction=prediction),
        make_row(4, [1, 5, 6, 7, 8], prediction=prediction),
    )
    assert {index: draft.tokens for index, draft in found.items()} == {
        0: [5, 6, 7, 8],
        1: [7, 8],
        2: [8],
    }
    assert {draft.kind for draft in found.values()} == {DraftKind.PREDICTION}
    assert [found[index].match_length for index in range(3)] == [1, 3, 1]


def test_a_prediction_may_be_for_a_prompt_that_ends_like_it() -> None:
    """The prompt, here 5, is no part of the output."""
    drafter = make_drafter()
    found = propose(drafter, make_row(0, [5], prediction=predicted(5, 6)))
    assert found[0].tokens == [5, 6]


def test_outputs_are_drafted_from_in_their_scope() -> None:
    drafter = make_drafter()
    for number, scope in ((0, "a"), (1, "b")):
        drafter.open(make_row(number, [9], draft_scope=scope).slot)
    ended = make_row(0, [9, 1, 2, 3, 4, -1], draft_scope="a")
    drafter.open(make_row(0, [9], draft_scope="a").slot)
    drafter._slots[0].slot = ended.slot
    drafter.close(0)
    rows = [
        make_row(number, [9, 2, 3], draft_scope=scope) for number, scope in ((2, "a"), (3, "b"))
    ]
    found = propose(drafter, *rows)
    assert {index: (draft.tokens, draft.kind) for index, draft in found.items()} == {
        0: ([4], DraftKind.RECENT)
    }


def test_what_was_generated_before_a_slot_was_opened_is_not_kept_twice() -> None:
    drafter = make_drafter()
    row = make_row(0, [9, 1, 2, 3])
    drafter.open(row.slot)
    drafter.close(0)
    assert propose(drafter, make_row(1, [9, 1, 2])) == {}


def test_ngrams_know_the_sequence_alone() -> None:
    drafter = make_drafter(method="ngram")
    drafter.open(make_row(0, [9]).slot)
    drafter._slots[0].slot = make_row(0, [9, 1, 2, 3, 4]).slot
    drafter.close(0)
    assert propose(drafter, make_row(1, [9, 2, 3])) == {}


class AskedSource:
    """A source that keeps what it was asked for, and which pages it was told of."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.num_noted = 0

    def open(self, slot: Slot) -> None: ...

    def close(self, number: int) -> None: ...

    def copy_pages(self, copies: Any) -> None: ...

    def note_pages(self, rows: Sequence[Row]) -> None:
        self.num_noted += 1

    def seconds(self, num_rows: int) -> float:
        return 0.0

    def look_up(self, asked: Mapping[int, AskedDraft]) -> dict[int, Draft]:
        self.asked += [each.most for each in asked.values()]
        return {i: Draft([9] * each.most, 1, DraftKind.MODEL) for i, each in asked.items()}


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_model_drafts_as_many_as_there_is_room_for(adaptive: bool) -> None:
    source, config = AskedSource(), SpeculativeConfig(adaptive=adaptive)
    drafter = Drafter(config, StepTimes({1: 1.0, 8: 1.0}), source)
    rows = [make_row(number, [1, 2], room) for number, room in enumerate((1, 8, 8))]
    for row in rows:
        drafter.open(row.slot)
    # The share of each is three, and the first has room for one.
    step = drafter.add_drafts(rows, 8)
    assert source.asked == [1, 3, 3]
    assert [row.drafts for row in step.rows] == [len(step.drafts[i].tokens) for i in range(3)]
    # Without room nothing is asked for, but pages are noted.
    assert drafter.add_drafts(rows, 0).drafts == {}
    assert (len(source.asked), source.num_noted) == (3, 2)


class SlowSource(AskedSource):
    """A source that takes 50 ms."""

    def look_up(self, asked: Mapping[int, AskedDraft]) -> dict[int, Draft]:
        time.sleep(0.05)
        return super().look_up(asked)


def test_the_time_of_a_draft_model_is_no_part_of_the_step_that_verifies() -> None:
    times = StepTimes({1: 0.01, 8: 0.01})
    drafter = Drafter(SpeculativeConfig(adaptive=False), times, SlowSource())
    row = make_row(0, [1, 2])
    drafter.open(row.slot)
    began = time.perf_counter()
    step = drafter.add_drafts([row])
    seconds = time.perf_counter() - began
    drawn = Drawn(tokens=np.zeros(9, np.int32), counts=np.full(1, 9))
    drafter.learn(step, drawn, seconds + 0.01)
    assert times.seconds(1, 8) < 0.012


class UselessSource(AskedSource):
    """A draft model whose step takes half of the other's, as it says."""

    def seconds(self, num_rows: int) -> float:
        return 0.0005


@pytest.mark.parametrize("prompt_rows", [0, 1])
def test_a_draft_model_of_no_use_is_asked_for_a_bounded_time(
    prompt_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its drafts take 20 steps, and none is accepted, with a prompt beside them or not."""
    monkeypatch.setattr(Acceptance, "_estimate", lambda *_: 0.99)
    times = StepTimes({1: 0.001, 64: 0.001})
    drafter = Drafter(SpeculativeConfig(), times, UselessSource())
    rows = [make_row(i, [1, 2]) for i in range(8)]
    prompt = make_row(8, [1, 2, 3], room=0)
    rows += [msgspec.structs.replace(prompt, start=0, count=3, samples=False)] * prompt_rows
    for row in rows:
        drafter.open(row.slot)
    clock = iter(range(10**6))
    monkeypatch.setattr(drafter_module.time, "perf_counter", lambda: next(clock) * 0.02)
    tried = 0
    for _ in range(1000):
        step = drafter.add_drafts(rows)
        tried += bool(step.drafts)
        drawn = Drawn(tokens=np.zeros(8, np.int32), counts=np.ones(8, np.int64))
        drafter.learn(step, drawn, 0.021 if step.drafts else 0.001)
    assert tried == 1


def test_steps_that_ask_for_no_drafts_spend_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """However their times vary: a draft model is asked as soon as its drafts seem to pay."""
    times = StepTimes({1: 0.1, 64: 0.1})
    drafter = Drafter(SpeculativeConfig(), times, UselessSource())
    row = make_row(0, [1, 2])
    drafter.open(row.slot)
    monkeypatch.setattr(Acceptance, "_estimate", lambda *_: 0.01)
    for number in range(3000):
        step = drafter.add_drafts([row])
        assert not step.drafts
        drawn = Drawn(tokens=np.zeros(1, np.int32))
        drafter.learn(step, drawn, 0.13 if number % 2 else 0.07)
    monkeypatch.setattr(Acceptance, "_estimate", lambda *_: 0.99)
    assert drafter.add_drafts([row]).drafts
