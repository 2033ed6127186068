"""Sets of token ids: what a request's outputs share, however often it names each id."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gpu.constraints.adjuster import _allowed_mask
from gpu.slots import SlotTable
from tests.support.plans import PlanMaker
from trioserve.protocol.sampling import SamplerParams, SamplingParams
from trioserve.protocol.token_ids import as_column, has_id
from trioserve.protocol.wire import StepResult, ints

IDS = st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 9), max_size=20)


@given(IDS, st.integers(0, 12))
def test_a_column_is_a_set(ids: list[int], other: int) -> None:
    column = as_column(ids)
    assert ints(column).tolist() == sorted(set(ids))
    assert as_column(column) is column
    assert all(has_id(column, token) for token in ids)
    assert has_id(column, other) == (other in ids)


@given(IDS)
def test_a_request_holds_each_id_once(ids: list[int]) -> None:
    distinct = tuple(sorted(set(ids)))
    params = SamplingParams(stop_token_ids=ids, allowed_token_ids=[*ids, 1])
    assert params.stop_token_ids == distinct
    assert params.allowed_token_ids == tuple(sorted({*ids, 1}))


def test_the_worker_holds_the_ids_of_several_outputs_once() -> None:
    maker = PlanMaker(
        lambda _: StepResult(number=0, slots=b"", generations=b"", offsets=b"", tokens=b"")
    )
    for slot in range(3):
        column = bytes(bytearray(as_column(range(5000))))
        maker.open(slot, [1], SamplerParams(stop_ids=column, sequence_index=slot, seed=slot))
    table = SlotTable(num_pages=64, page_size=4, max_model_len=16, vocab_size=5000)
    table.apply(maker.plan({}))
    assert [each.sampler.sequence_index for each in table] == [0, 1, 2]
    assert [each.sampler.seed for each in table] == [0, 1, 2]
    assert len({id(each.sampler.stop_ids) for each in table}) == 1


def test_outputs_share_a_mask() -> None:
    column = as_column([0, 31, 32, 99])
    mask = _allowed_mask(column, 4)
    assert _allowed_mask(bytes(bytearray(column)), 4) is mask
    assert mask.view(np.uint32).tolist() == [1 << 31 | 1, 1, 0, 8]
    assert _allowed_mask(b"", 2).tolist() == [-1, -1]
