"""Drafts count while they are the tokens that are sampled in their places."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

from gpu.sampling.drawn import Drawn
from gpu.sampling.verification import Verification
from gpu.slots import Row, Slot
from trioserve.protocol.sampling import SamplerParams
from trioserve.protocol.wire import from_ints

STOP = 9


def make_row(number: int, known: Sequence[int], drafts: Sequence[int]) -> Row:
    buffer = np.zeros(len(known) + 1, dtype=np.int32)
    buffer[: len(known)] = known
    slot = Slot(
        number=number,
        generation=0,
        prompt_length=1,
        computed=len(known) - 1,
        sampler=SamplerParams(stop_ids=from_ints([STOP])),
        buffer=buffer,
        length=len(known),
    )
    slot.draft(drafts)
    return Row(slot=slot, start=len(known) - 1, count=1, samples=True, drafts=len(drafts))


def target(tokens: Sequence[int]) -> int:
    """Return the next token, which depends on all before."""
    return (sum(tokens) * 7 + len(tokens)) % 10


def drawn_for(rows: Sequence[Row]) -> Drawn:
    tokens = np.array([target(row.slot.tokens.tolist()) for row in rows], dtype=np.int32)
    return Drawn(
        tokens=tokens,
        logprobs=-tokens.astype(np.float32),
        top=[(np.array([token]), np.array([-1.0], dtype=np.float32)) for token in tokens],
    )


def verify(rows: Sequence[Row], stepwise: Collection[int]) -> Verification:
    verification = Verification(rows, stepwise)
    while verification.places:
        verification.take(drawn_for(verification.sampling_rows))
    return verification


def expected(known: list[int], drafts: list[int]) -> list[int]:
    """Return what is sampled one after the other, as far as the drafts agree."""
    tokens: list[int] = []
    for draft in [*drafts, None]:
        tokens.append(target(known + tokens))
        if tokens[-1] != draft or (tokens[-1] == STOP and len(known + tokens) > 1):
            break
    return tokens


def some_drafts(known: list[int], right: int, wrong: list[int]) -> list[int]:
    drafts: list[int] = []
    for _ in range(right):
        drafts.append(target(known + drafts))
    return drafts + wrong


CASES = strategies.lists(
    strategies.tuples(
        strategies.lists(strategies.integers(0, 9), min_size=2, max_size=4),
        strategies.integers(0, 4),
        strategies.lists(strategies.integers(0, 9), max_size=3),
        strategies.booleans(),
    ),
    min_size=1,
    max_size=4,
)


@hypothesis.given(CASES)
def test_tokens_are_those_that_are_sampled_one_by_one(
    cases: list[tuple[list[int], int, list[int], bool]],
) -> None:
    drafts = [some_drafts(known, right, wrong) for known, right, wrong, _ in cases]
    rows = [make_row(i, known, drafts[i]) for i, (known, _, _, _) in enumerate(cases)]
    stepwise = {i for i, case in enumerate(cases) if case[3]}
    verification = verify(rows, stepwise)
    wanted = [expected(known, drafts[i]) for i, (known, _, _, _) in enumerate(cases)]
    drawn = verification.result()
    flat = [token for tokens in wanted for token in tokens]
    assert drawn.tokens.tolist() == flat
    assert drawn.counts is not None
    assert drawn.counts.tolist() == [len(tokens) for tokens in wanted]
    assert drawn.logprobs is not None
    assert drawn.logprobs.tolist() == [-float(token) for token in flat]
    assert drawn.top is not None
    assert [ids.tolist() for ids, _ in drawn.top] == [[token] for token in flat]
    assert drawn.drafted is not None
    assert drawn.drafted.tolist() == [len(each) for each in drafts]


def test_drafts_are_no_tokens_of_the_slot() -> None:
    row = make_row(0, [1, 2, 3], [4, 5])
    assert row.slot.tokens.tolist() == [1, 2, 3]
    assert row.slot.span(2, 5).tolist() == [3, 4, 5]
    assert row.slot.drafted(1).tokens.tolist() == [1, 2, 3, 4]
    assert row.slot.extend() == 3
    assert row.slot.tokens.tolist() == [1, 2, 3, -1]


def matches(cases: Sequence[tuple[list[int], list[int]]]) -> bool:
    """Return whether rows of known tokens and drafts get what is sampled one by one."""
    rows = [make_row(i, known, drafts) for i, (known, drafts) in enumerate(cases)]
    wanted = [token for known, drafts in cases for token in expected(known, drafts)]
    return verify(rows, ()).result().tokens.tolist() == wanted


def ends_with_a_stop(known: list[int]) -> list[int]:
    """Return right drafts, the first of which ends the sequence."""
    assert target(known) == STOP
    return some_drafts(known, 3, [])


STOPPING = next([1, 1, x] for x in range(10) if target([1, 1, x]) == STOP)
CASES_FOR_DEFECTS = [
    ([1, 2], some_drafts([1, 2], 2, [99])),
    ([3, 4, 5], some_drafts([3, 4, 5], 3, [])),
    (STOPPING, ends_with_a_stop(STOPPING)),
]


def test_planted_defects_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft accepted one too far, one that goes on past the end, and places that are off."""
    assert matches(CASES_FOR_DEFECTS)
    right = Verification._goes_on

    def too_far(self: Verification, index: int, depth: int, token: int) -> bool:
        return depth < self._rows[index].drafts

    def past_the_end(self: Verification, index: int, depth: int, token: int) -> bool:
        row = self._rows[index]
        position = row.slot.num_tokens + depth
        return depth < row.drafts and row.slot.token(position) == token

    def one_off(self: Verification, index: int, depth: int, token: int) -> bool:
        return depth > 0 and right(self, index, depth - 1, token)

    for defect in (too_far, past_the_end, one_off):
        monkeypatch.setattr(Verification, "_goes_on", defect)
        assert not matches(CASES_FOR_DEFECTS), defect.__name__
