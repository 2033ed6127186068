"""The messages of rank 0 to the ranks that follow, as MessagePack."""

from __future__ import annotations

from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from gpu.models.step_embeddings import StepEmbeddings
from gpu.weights.blocks import BFLOAT16, FLOAT32, Numbers


class SentEmbeddings(msgspec.Struct, frozen=True):
    """Embeddings of a step (:class:`gpu.models.step_embeddings.StepEmbeddings`), as bytes."""

    places: bytes
    rows: bytes

    @classmethod
    def of(cls, embedded: StepEmbeddings | None) -> SentEmbeddings | None:
        """Return the message for ``embedded``."""
        if embedded is None:
            return None
        return cls(embedded.places.tobytes(), embedded.rows.tobytes())

    def received(self) -> StepEmbeddings:
        """Return the embeddings, in memory of their own."""
        places = np.frombuffer(bytearray(self.places), dtype=np.int64)
        rows = np.frombuffer(bytearray(self.rows), dtype=np.float32)
        return StepEmbeddings(places, rows.reshape(len(places), -1))


class GiveCache(msgspec.Struct, frozen=True, tag=True):
    """The first message: make a KV cache of so many pages."""

    num_pages: int
    num_host_pages: int
    """Pages behind these that stand for the host's memory elsewhere."""


class Compute(msgspec.Struct, frozen=True, tag=True):
    """Compute the hidden states of a step by torch; fields are those of its layout, as bytes."""

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
    rotary_positions: bytes | None
    adapted: dict[int, bytes]
    """By the adapter's number: places of its tokens, int64."""
    embedded: SentEmbeddings | None


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


class ComputeRows(msgspec.Struct, frozen=True, tag=True):
    """Compute the hidden states of a step by the compiled kernels.

    Fields are those of :class:`gpu.cpu.step_arrays.CompiledStep`, as bytes.
    """

    tokens: bytes
    query_start: bytes
    context_lens: bytes
    block_tables: bytes
    rotary_positions: bytes | None
    adapted: dict[int, bytes]
    embedded: SentEmbeddings | None


class ComputeRowLogits(msgspec.Struct, frozen=True, tag=True):
    """Compute the logits of some of the step's hidden states by the compiled kernels."""

    rows: bytes
    """int32."""


class CopyPages(msgspec.Struct, frozen=True, tag=True):
    """Copy pages of the KV cache."""

    copies: bytes
    """[C, 2] int32, source and destination."""


class BeginTransfer(msgspec.Struct, frozen=True, tag=True):
    """Note that pages may be transferred that all steps before this message are done with."""


class ReadOnRanks(msgspec.Struct, frozen=True, tag=True):
    """Read other weights while steps are computed; send rank 0 an error, or an empty message."""

    path: str


class SwapOnRanks(msgspec.Struct, frozen=True, tag=True):
    """Compute with the weights that were read."""


class DiscardOnRanks(msgspec.Struct, frozen=True, tag=True):
    """Drop weights that were read, or are being read, and that weren't swapped in."""


class ReturnResults(msgspec.Struct, frozen=True, tag=True):
    """Let the last of several stages send rank 0 what a step is for, in the order of the fields.

    Pairs are a first hidden state of the step and the one behind the last.
    """

    pooled: list[tuple[int, int]]
    """Hidden states, in float32."""
    scored: list[tuple[int, int]]
    """Hidden states whose logits are sent, in slices."""
    drawn: bytes
    """[R] int64, the hidden states whose logits are sent at once."""


Step: TypeAlias = (
    GiveCache
    | LoadOnRanks
    | UnloadOnRanks
    | Compute
    | ComputeLogits
    | ComputeRows
    | ComputeRowLogits
    | CopyPages
    | BeginTransfer
    | ReadOnRanks
    | SwapOnRanks
    | DiscardOnRanks
    | ReturnResults
)
_decoder = msgspec.msgpack.Decoder(Step)


def encode_step(step: Step) -> bytes:
    """Return ``step`` as bytes."""
    return msgspec.msgpack.encode(step)


def decode_step(message: bytes) -> Step:
    """Return the step of a message."""
    step: Step = _decoder.decode(message)
    return step


def sent_positions(positions: npt.NDArray[np.int64] | None) -> bytes | None:
    """Return rotary positions [T, 3] as bytes."""
    return None if positions is None else positions.tobytes()


def received_positions(sent: bytes | None) -> npt.NDArray[np.int64] | None:
    """Return the rotary positions of :func:`sent_positions`, in memory of their own."""
    return None if sent is None else np.frombuffer(bytearray(sent), dtype=np.int64).reshape(-1, 3)


def packed(numbers: Numbers) -> PackedNumbers:
    """Return a matrix as a message."""
    rows, columns = numbers.shape
    return PackedNumbers(numbers.tobytes(), (rows, columns), numbers.dtype == BFLOAT16)


def numbers_of(message: PackedNumbers) -> Numbers:
    """Return the matrix of a message, in memory of its own."""
    dtype = BFLOAT16 if message.is_bfloat16 else FLOAT32
    return np.frombuffer(bytearray(message.data), dtype=dtype).reshape(message.shape)
