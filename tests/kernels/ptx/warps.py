"""Instructions at which the threads of a warp, or of the block, meet."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.kernels.ptx.formats import BF16, FP16, Format
from tests.kernels.ptx.machine import WARP, Array, Block, to_bits, typed
from tests.kernels.ptx.text import Instruction, PtxError

__all__ = ["BLOCK_MEETINGS", "WARP_MEETINGS", "members"]

Operation = Callable[[Block, Instruction, Array], None]
_LANES = np.arange(WARP)


def members(block: Block, instruction: Instruction, threads: Array) -> int:
    """Return the lanes that have to meet: the operand that names them, or all."""
    if instruction.opcode.startswith(("mma.", "ldmatrix.")):
        return (1 << WARP) - 1
    masks = np.unique(typed(block.read(instruction.operands[-1], threads), "u32"))
    if len(masks) > 1:
        raise PtxError(f"{instruction.opcode}: its threads name different lanes")
    return int(masks[0])


def _shuffle(source_lane: Callable[[Array, Array, Array], Array]) -> Operation:
    def shuffle(block: Block, instruction: Instruction, threads: Array) -> None:
        target, value, lane, bounds, _ = instruction.operands
        lanes = threads % WARP
        values = np.zeros(WARP, np.uint64)
        values[lanes] = block.read(value, threads)
        inside = np.zeros(WARP, bool)
        inside[lanes] = True
        bound = block.read(bounds, threads).astype(np.int64)
        segment = bound >> 8 & 31
        most = lanes & segment | (bound & 31) & ~segment
        wanted = source_lane(lanes, block.read(lane, threads).astype(np.int64) & 31, segment)
        valid = wanted <= most
        wanted = np.where(valid, wanted, lanes)
        if not inside[wanted].all():
            raise PtxError(f"{instruction.opcode}: a value of a lane that doesn't take part")
        results = (values[wanted], valid.astype(np.uint64))
        for part, result in zip(block.parts(target), results, strict=False):
            block.write(part, threads, result)

    return shuffle


def _vote_any(block: Block, instruction: Instruction, threads: Array) -> None:
    target, predicate, _ = instruction.operands
    votes = block.read(predicate, threads)
    block.write(target, threads, np.full(len(threads), votes.any(), np.uint64))


def _vote_ballot(block: Block, instruction: Instruction, threads: Array) -> None:
    target, predicate, _ = instruction.operands
    votes = block.read(predicate, threads) << (threads % WARP).astype(np.uint64)
    block.write(target, threads, np.full(len(threads), votes.sum(), np.uint64))


def _count(block: Block, instruction: Instruction, threads: Array) -> None:
    target, _, predicate = instruction.operands
    votes = block.read(predicate, threads)
    block.write(target, threads, np.full(len(threads), votes.sum(), np.uint64))


def _nothing(block: Block, instruction: Instruction, threads: Array) -> None:
    """Do nothing but meet."""


def _load_matrices(*, transposed: bool) -> Operation:
    """Run ldmatrix on four matrices; the lanes give the addresses of rows, eight lanes a matrix.

    A lane gets two neighbours of each matrix, the lanes in the order of its elements.
    """

    def load_matrices(block: Block, instruction: Instruction, threads: Array) -> None:
        target, address = instruction.operands
        rows = block.load("shared", block.address(address, threads), 16).view(np.uint16)
        matrices = rows.reshape(4, 8, 8)
        if transposed:
            matrices = matrices.transpose(0, 2, 1)
        parts = block.parts(target)
        for part, matrix in zip(parts, matrices, strict=True):
            pairs = np.ascontiguousarray(matrix).reshape(WARP, 2).view(np.uint32)
            block.write(part, threads, to_bits(pairs[:, 0]))

    return load_matrices


# "Matrix Fragments for mma.m16n8k16 with floating point type": row and column of element i.
_GROUP, _IN_GROUP = _LANES[:, None] >> 2, _LANES[:, None] % 4
_I8, _I4 = np.arange(8)[None], np.arange(4)[None]
_A_ROW = np.where((_I8 < 2) | ((_I8 >= 4) & (_I8 < 6)), _GROUP, _GROUP + 8)
_A_COLUMN = np.where(_I8 < 4, 0, 8) + _IN_GROUP * 2 + (_I8 & 1)
_B_ROW = np.where(_I4 < 2, 0, 8) + _IN_GROUP * 2 + (_I4 & 1)
_B_COLUMN = np.broadcast_to(_GROUP, (WARP, 4))
_C_ROW = np.where(_I4 < 2, _GROUP, _GROUP + 8)
_C_COLUMN = _IN_GROUP * 2 + (_I4 & 1)


def _multiply(element: Format) -> Operation:
    """mma.m16n8k16; sums are exact and rounded once."""

    def multiply(block: Block, instruction: Instruction, threads: Array) -> None:
        target, *sources = (block.parts(each) for each in instruction.operands)
        a, b, c = (
            np.stack([typed(block.read(part, threads), "u32") for part in parts], axis=1)
            for parts in sources
        )
        matrix_a, matrix_b = np.empty((16, 16)), np.empty((16, 8))
        matrix_a[_A_ROW, _A_COLUMN] = element.decode(a.view(np.uint16))
        matrix_b[_B_ROW, _B_COLUMN] = element.decode(b.view(np.uint16))
        matrix_c = np.empty((16, 8))
        matrix_c[_C_ROW, _C_COLUMN] = c.view(np.float32)
        products = matrix_a[:, :, None] * matrix_b[None]
        result = (matrix_c + products.sum(axis=1)).astype(np.float32)[_C_ROW, _C_COLUMN]
        for at, part in enumerate(target):
            block.write(part, threads, to_bits(result[:, at]))

    return multiply


WARP_MEETINGS: dict[str, Operation] = {
    "bar.warp.sync": _nothing,
    "shfl.sync.bfly.b32": _shuffle(lambda lanes, mask, segment: lanes ^ mask),
    "shfl.sync.idx.b32": _shuffle(
        lambda lanes, index, segment: (lanes & segment) | (index & ~segment)
    ),
    "vote.sync.any.pred": _vote_any,
    "vote.sync.ballot.b32": _vote_ballot,
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16": _load_matrices(transposed=False),
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16": _load_matrices(transposed=True),
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32": _multiply(BF16),
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32": _multiply(FP16),
}
BLOCK_MEETINGS: dict[str, Operation] = {"bar.sync": _nothing, "bar.red.popc.u32": _count}
