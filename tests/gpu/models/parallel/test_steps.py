"""The messages between ranks: what arrives is what was sent."""

from __future__ import annotations

import itertools
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import numpy as np
import pytest

from gpu.attention import StepLayout
from gpu.cpu.compiled_ranks import compute_rows, step_of_rows
from gpu.cpu.rank_processes import RankOrder, read_order, write_order
from gpu.cpu.step_arrays import CompiledStep
from gpu.models.parallel.layouts import compute, layout_of
from gpu.models.parallel.link import RankLink, agreed, connect_ranks
from gpu.models.parallel.steps import (
    Compute,
    ComputeLogits,
    ComputeRowLogits,
    ComputeRows,
    CopyPages,
    DiscardOnRanks,
    GiveCache,
    LoadOnRanks,
    LowRank,
    ReadOnRanks,
    ReturnResults,
    SentEmbeddings,
    Step,
    SwapOnRanks,
    UnloadOnRanks,
    decode_step,
    encode_step,
    numbers_of,
    packed,
)
from gpu.models.step_embeddings import StepEmbeddings
from gpu.weights.blocks import BFLOAT16
from trioserve.config import EngineConfig
from trioserve.engine.worker_start import start_message
from trioserve.protocol.errors import ModelLoadError

MATRIX = np.arange(6, dtype=np.float32).reshape(2, 3)


def test_a_layout_arrives_as_it_was() -> None:
    layout = StepLayout(
        positions=np.array([7, 3, 4, 5]),
        query_start=np.array([0, 1, 4]),
        context_lens=np.array([8, 6]),
        slots=np.array([4, 0]),
        block_tables=np.array([[3, 1, 0], [2, 9, 5]], dtype=np.int32)[:, :2],
        num_decode_rows=1,
        rotary_positions=np.arange(12).reshape(4, 3),
    )
    tokens = np.array([11, 12, 13, 14])
    places = np.array([0, 2])
    embedded = StepEmbeddings(np.array([1, 4]), np.ones((2, 3), np.float32))
    step = decode_step(encode_step(compute(tokens, layout, {3: places}, embedded)))
    assert isinstance(step, Compute)
    assert step.embedded is not None
    received = step.embedded.received()
    assert np.array_equal(received.places, embedded.places)
    assert np.array_equal(received.rows, embedded.rows)
    assert step.adapted == {3: places.tobytes()}
    assert step.tokens == tokens.tobytes()
    found, wanted = attrs.asdict(layout_of(step)), attrs.asdict(layout)
    assert found.pop("num_decode_rows") == wanted.pop("num_decode_rows")
    for name, values in wanted.items():
        assert found[name].dtype == values.dtype
        assert np.array_equal(found[name], values), name


def test_a_step_of_the_compiled_kernels_arrives_as_it_was() -> None:
    arrays = {
        "tokens": np.array([11, 12, 13], dtype=np.int32),
        "query_start": np.array([0, 1, 3]),
        "context_lens": np.array([8, 6]),
        "block_tables": np.array([[3, 1], [2, 9]], dtype=np.int32),
        "rotary_positions": np.arange(9).reshape(3, 3),
    }
    step = CompiledStep(**arrays, adapted={}, embedded=None)
    message = decode_step(encode_step(compute_rows(step)))
    assert isinstance(message, ComputeRows)
    found = step_of_rows(message)
    for name, values in arrays.items():
        assert getattr(found, name).dtype == values.dtype
        assert np.array_equal(getattr(found, name), values), name


@pytest.mark.parametrize(
    "step",
    [
        GiveCache(5, 2),
        ComputeLogits(b"\x00\x01", 1),
        ComputeRows(b"12", b"34", b"56", b"78", b"90", {3: b"9"}, SentEmbeddings(b"1", b"2")),
        ComputeRowLogits(b"\x00\x01\x00\x00"),
        CopyPages(bytes(16)),
        LoadOnRanks(3, [LowRank(1, "mlp.up_proj", packed(MATRIX), packed(MATRIX), 0.5)]),
        UnloadOnRanks(3),
        ReadOnRanks("/weights"),
        SwapOnRanks(),
        DiscardOnRanks(),
        ReturnResults([(0, 3)], [(1, 2), (4, 9)], bytes(16)),
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
        rank=2,
        parent=7,
        sockets=[9, 10],
        rendezvous="/m",
        dtype="float32",
        num_threads=1,
        start=start,
        is_compiled=False,
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


def test_rank_0_sends_to_all_and_each_receives_in_order() -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    leading = RankLink(0, [near for near, _ in pairs])
    others = [RankLink(rank, [far]) for rank, (_, far) in enumerate(pairs, 1)]
    messages = [b"", b"one", bytes(1 << 20)]
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(lambda: [leading.send(each) for each in messages])
        for other in others:
            assert [other.receive() for _ in messages] == messages
        sending.result()
    for near, _ in pairs:
        near.close()
    for other in others:
        with pytest.raises(EOFError, match="the other rank has ended"):
            other.receive()


@pytest.mark.parametrize("errors", [("", "", ""), ("", "no memory", ""), ("first", "", "last")])
def test_an_error_on_one_rank_is_that_of_all(errors: tuple[str, str, str]) -> None:
    pairs = [socket.socketpair() for _ in errors[1:]]
    links = [RankLink(0, [near for near, _ in pairs])]
    links += [RankLink(rank, [far]) for rank, (_, far) in enumerate(pairs, 1)]

    def load(rank: int) -> str:
        def fail() -> int:
            if errors[rank]:
                raise ModelLoadError(errors[rank])
            return rank

        try:
            assert agreed(links[rank], fail) == rank
        except ModelLoadError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(links)) as pool:
        told = list(pool.map(load, range(len(links))))
    assert told == [next(filter(None, errors), "")] * len(links)


def test_what_a_load_raises_is_told_with_the_rank() -> None:
    near, far = socket.socketpair()
    leading, other = RankLink(0, [near]), RankLink(1, [far])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(agreed, leading, lambda: 0)
        with pytest.raises(ModelLoadError, match=r"rank 1 can't load its part: .*division"):
            agreed(other, lambda: 1 // 0)
        with pytest.raises(ModelLoadError, match="rank 1 can't load its part"):
            waiting.result()


def test_stages_send_to_the_rank_of_their_number_behind_them_without_waiting() -> None:
    """The last stage sends to the first one. More than a buffer holds arrives whole."""
    links = connect_ranks(3, 2)
    stages = [link.stages for link in links if link.stages is not None]
    assert [(each.stage, each.rank) for each in stages] == list(itertools.product(range(3), (0, 1)))
    assert [each.is_first for each in stages] == [True, True, False, False, False, False]
    assert [each.is_last for each in stages] == [False, False, False, False, True, True]
    for rank, stage in enumerate(stages):
        for size in (3, 1 << 20):
            numbers = np.full((2, size), rank, dtype=np.float32)
            stage.send(numbers)
            numbers[:] = -1  # the next step's
    for rank, stage in enumerate(stages):
        for size in (3, 1 << 20):
            found = stage.receive(np.empty((2, size), dtype=np.float32))
            assert (found == (rank - 2) % 6).all()
    for each in links[0].sockets:
        each.close()
    with pytest.raises(EOFError, match="the other rank has ended"):
        stages[2].receive(np.empty(1, dtype=np.float32))
    for link in links[1:]:
        for each in link.sockets:
            each.close()
