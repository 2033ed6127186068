"""The messages between ranks: what arrives is what was sent."""

from __future__ import annotations

import os
from pathlib import Path

import attrs
import numpy as np
import pytest

from gpu.attention import StepLayout
from gpu.cpu.rank_processes import RankOrder, read_order, write_order
from gpu.models.parallel.steps import (
    Compute,
    ComputeLogits,
    CopyPages,
    GiveCache,
    LoadOnRanks,
    LowRank,
    Step,
    UnloadOnRanks,
    compute,
    decode_step,
    encode_step,
    layout_of,
    numbers_of,
    packed,
)
from gpu.weights.blocks import BFLOAT16
from trioserve.config import EngineConfig
from trioserve.engine.worker_start import start_message

MATRIX = np.arange(6, dtype=np.float32).reshape(2, 3)


def test_a_layout_arrives_as_it_was() -> None:
    layout = StepLayout(
        positions=np.array([7, 3, 4, 5]),
        query_start=np.array([0, 1, 4]),
        context_lens=np.array([8, 6]),
        slots=np.array([4, 0]),
        block_tables=np.array([[3, 1, 0], [2, 9, 5]], dtype=np.int32)[:, :2],
        num_decode_rows=1,
    )
    tokens = np.array([11, 12, 13, 14])
    places = np.array([0, 2])
    step = decode_step(encode_step(compute(tokens, layout, {3: places})))
    assert isinstance(step, Compute)
    assert step.adapted == {3: places.tobytes()}
    assert step.tokens == tokens.tobytes()
    found, wanted = attrs.asdict(layout_of(step)), attrs.asdict(layout)
    assert found.pop("num_decode_rows") == wanted.pop("num_decode_rows")
    for name, values in wanted.items():
        assert found[name].dtype == values.dtype
        assert np.array_equal(found[name], values), name


@pytest.mark.parametrize(
    "step",
    [
        GiveCache(5, 2),
        ComputeLogits(b"\x00\x01", 1),
        CopyPages(bytes(16)),
        LoadOnRanks(3, [LowRank(1, "mlp.up_proj", packed(MATRIX), packed(MATRIX), 0.5)]),
        UnloadOnRanks(3),
    ],
)
def test_other_steps_arrive_as_they_were(step: Step) -> None:
    assert decode_step(encode_step(step)) == step


def test_a_matrix_arrives_in_its_number_format() -> None:
    for matrix in (MATRIX, MATRIX.astype(BFLOAT16)):
        found = numbers_of(packed(matrix))
        assert found.dtype == matrix.dtype
        assert np.array_equal(found, matrix)


def test_a_rank_is_told_what_to_load() -> None:
    start = start_message(EngineConfig("m", tensor_parallel_size=3), Path("/models/m"))
    order = RankOrder(
        rank=2, parent=7, rendezvous="/m", dtype="float32", num_threads=1, start=start
    )
    reader, writer = os.pipe()
    message = write_order(order)
    os.write(writer, message + b"more")
    assert read_order(reader) == order
    assert os.read(reader, 9) == b"more"
    os.write(writer, message[:-1])
    os.close(writer)
    with pytest.raises(EOFError, match="the worker has ended"):
        read_order(reader)
    os.close(reader)
