"""Drafts of rows: what followed before, no more than a row has room for, and long prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from gpu.sampling.drafting import drafter as drafter_module
from gpu.sampling.drafting.drafter import Drafter
from gpu.sampling.drafting.step_times import StepTimes
from gpu.slots import Row, Slot
from trioserve.protocol.sampling import SamplerParams
from trioserve.protocol.speculation import SpeculativeConfig


def make_row(number: int, tokens: Sequence[int], room: int = 8, **sampler: bool) -> Row:
    buffer = np.array(tokens, dtype=np.int32)
    slot = Slot(
        number=number,
        generation=0,
        prompt_length=1,
        computed=len(tokens) - 1,
        sampler=SamplerParams(**sampler),
        buffer=buffer,
        length=len(tokens),
    )
    return Row(slot=slot, start=len(tokens) - 1, count=1, samples=True, drafts=room)


def make_drafter(**fields: bool | int | str) -> Drafter:
    """Return a drafter on a machine where tokens cost nothing, unless ``fields`` say otherwise."""
    config = SpeculativeConfig(**{"adaptive": False, **fields})  # type: ignore[arg-type]
    return Drafter(config, StepTimes({1: 1.0, 8: 1.0}))


@pytest.mark.parametrize("method", ["suffix", "ngram"])
def test_what_followed_is_drafted(method: str) -> None:
    drafter = make_drafter(method=method)
    row = make_row(0, [1, 2, 3, 4, 5, 9, 1, 2, 3])
    assert drafter.propose([row])[0].tokens == [4, 5, 9, 1, 2, 3, 4, 5]
    assert drafter.propose([make_row(1, [1, 2, 3, 4, 5, 9, 1, 2, 3], room=2)])[0].tokens == [4, 5]


def test_rows_without_room_a_match_or_the_wish_have_no_drafts() -> None:
    repeated = [1, 2, 3, 1, 2]
    rows = [
        make_row(0, repeated, room=0),
        make_row(1, [1, 2, 3, 4, 5]),
        make_row(2, repeated, speculative=False),
        make_row(3, repeated),
    ]
    assert list(make_drafter().propose(rows)) == [3]
    assert make_drafter(prompt_lookup_min=3).propose(rows) == {}


def test_a_slot_that_is_opened_again_is_indexed_anew() -> None:
    drafter = make_drafter()
    assert drafter.propose([make_row(0, [1, 2, 3, 1, 2])])[0].tokens[0] == 3
    other = make_row(0, [7, 8, 9, 7, 8])
    drafter.open(other.slot)
    assert drafter.propose([other])[0].tokens[0] == 9


def test_a_long_prompt_is_indexed_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter_module, "MAX_INDEXED_AT_ONCE", 10)
    drafter = make_drafter()
    rows = [make_row(0, [*range(20), 0, 1]), make_row(1, [1, 2, 1, 2])]
    assert [sorted(drafter.propose(rows)) for _ in range(4)] == [[], [], [0, 1], [0, 1]]


def test_of_a_very_long_sequence_the_last_tokens_are_indexed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drafter_module, "MAX_INDEXED", 6)
    drafter = make_drafter()
    found = drafter.propose([make_row(0, [5, 6, 8, 1, 2, 3, 4, 1, 2])])
    assert found[0].tokens[:2] == [3, 4]
    assert drafter.propose([make_row(1, [5, 6, 8, 1, 2, 3, 4, 5, 6])]) == {}


def test_drafts_that_are_never_accepted_are_given_up() -> None:
    drafter = Drafter(SpeculativeConfig(), StepTimes({1: 1.0, 8: 1.5}))
    row = make_row(0, [1, 2, 3, 1, 2])
    tried = 0
    for _ in range(100):
        drafts = drafter.propose([row])
        tried += bool(drafts)
        drafter.observe([row], drafts, dict.fromkeys(drafts, 0))
    assert 0 < tried < 60
