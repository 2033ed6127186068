"""The messages of rank 0 to the ranks that follow, as MessagePack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from gpu.attention import StepLayout
from gpu.weights.blocks import BFLOAT16, FLOAT32, Numbers


class GiveCache(msgspec.Struct, frozen=True, tag=True):
    """The first message: make a KV cache of so many pages."""

    num_pages: int
    num_host_pages: int
    """Pages behind these that stand for the host's memory elsewhere."""


class Compute(msgspec.Struct, frozen=True, tag=True):
    """Compute the hidden states of a step; fields are those of its layout, as bytes."""

    tokens: bytes
    """[T] int64."""
    positions: bytes
    query_start: bytes
    context_lens: bytes
    slots: bytes
    block_tables: bytes
    width: int
    """Pages in each row of the block tables."""
    num_decode_rows: int
    adapted: dict[int, bytes]
    """By the adapter's number: places of its tokens, int64."""


class PackedNumbers(msgspec.Struct, frozen=True):
    """A matrix of an adapter."""

    data: bytes
    shape: tuple[int, int]
    is_bfloat16: bool
    """False for float32."""


class LowRank(msgspec.Struct, frozen=True):
    """The update of one projection (:class:`gpu.lora.reading.LowRankUpdate`)."""

    layer: int
    module: str
    a: PackedNumbers
    b: PackedNumbers
    scale: float


class LoadOnRanks(msgspec.Struct, frozen=True, tag=True):
    """Hold an adapter; each rank takes its part."""

    number: int
    updates: list[LowRank]


class UnloadOnRanks(msgspec.Struct, frozen=True, tag=True):
    """Forget an adapter."""

    number: int


class ComputeLogits(msgspec.Struct, frozen=True, tag=True):
    """Compute the logits of hidden states."""

    hidden: bytes
    num_rows: int


class CopyPages(msgspec.Struct, frozen=True, tag=True):
    """Copy pages of the KV cache."""

    copies: bytes
    """[C, 2] int32, source and destination."""


Step: TypeAlias = GiveCache | LoadOnRanks | UnloadOnRanks | Compute | ComputeLogits | CopyPages
_decoder = msgspec.msgpack.Decoder(Step)


def encode_step(step: Step) -> bytes:
    """Return ``step`` as bytes."""
    return msgspec.msgpack.encode(step)


def decode_step(message: bytes) -> Step:
    """Return the step of a message."""
    step: Step = _decoder.decode(message)
    return step


def packed(numbers: Numbers) -> PackedNumbers:
    """Return a matrix as a message."""
    rows, columns = numbers.shape
    return PackedNumbers(numbers.tobytes(), (rows, columns), numbers.dtype == BFLOAT16)


def numbers_of(message: PackedNumbers) -> Numbers:
    """Return the matrix of a message; it may be read only."""
    dtype = BFLOAT16 if message.is_bfloat16 else FLOAT32
    return np.frombuffer(message.data, dtype=dtype).reshape(message.shape)


def compute(
    tokens: npt.NDArray[np.int64],
    layout: StepLayout,
    adapted: Mapping[int, npt.NDArray[np.int64]],
) -> Compute:
    """Return the message for a step.

    Args:
        tokens: [T], in the order of ``layout``.
        layout: Rows of the step.
        adapted: By the adapter's number, the places of its tokens.
    """
    return Compute(
        tokens=tokens.tobytes(),
        positions=layout.positions.tobytes(),
        query_start=layout.query_start.tobytes(),
        context_lens=layout.context_lens.tobytes(),
        slots=layout.slots.tobytes(),
        block_tables=layout.block_tables.tobytes(),
        width=layout.block_tables.shape[1],
        num_decode_rows=layout.num_decode_rows,
        adapted={number: own.tobytes() for number, own in adapted.items()},
    )


def layout_of(step: Compute) -> StepLayout:
    """Return the layout that :func:`compute` got."""
    tables = np.frombuffer(step.block_tables, dtype=np.int32).copy()
    return StepLayout(
        positions=_longs(step.positions),
        query_start=_longs(step.query_start),
        context_lens=_longs(step.context_lens),
        slots=_longs(step.slots),
        block_tables=tables.reshape(-1, step.width),
        num_decode_rows=step.num_decode_rows,
    )


def _longs(column: bytes) -> npt.NDArray[np.int64]:
    return np.frombuffer(column, dtype=np.int64).copy()
