"""Loads, stores, atomics and asynchronous copies."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from tests.kernels.ptx.machine import Array, Block, dtype_of, to_bits, typed
from tests.kernels.ptx.text import Address, Instruction, PtxError, Symbol, Vector

__all__ = ["memory_operation"]

Operation = Callable[[Block, Instruction, Array], None]

_ACCESS = re.compile(
    r"(ld|st)(?:\.relaxed\.gpu)?\.(param|global|shared)(?:\.nc\.L1::no_allocate)?"
    r"(?:\.v([24]))?\.([usbf](?:8|16|32|64))"
)
_ATOMIC = re.compile(r"atom\.(global|shared)\.(add|max)\.([us]32)")
_WAYS: dict[str, Callable[[int, int], int]] = {"add": lambda a, b: a + b, "max": max}


def memory_operation(opcode: str) -> Operation | None:
    """Return the semantics of an opcode, if it is one of memory."""
    if opcode == "cp.async.cg.shared.global.L2::128B":
        return _copy
    if opcode == "cp.async.commit_group":
        return lambda block, _, threads: block.close_copy_group(threads)
    if opcode == "cp.async.wait_group":
        return _wait
    if access := _ACCESS.fullmatch(opcode):
        name, space, count, kind = access.groups()
        return _load(space, int(count or 1), kind) if name == "ld" else _store(space, kind)
    if atomic := _ATOMIC.fullmatch(opcode):
        return _atomic(*atomic.groups())
    if re.fullmatch(r"mov\.([usbf](?:16|32|64)|pred)", opcode):
        return _move
    return None


def _load(space: str, count: int, kind: str) -> Operation:
    dtype = dtype_of(kind)

    def load(block: Block, instruction: Instruction, threads: Array) -> None:
        target, source = instruction.operands
        parts = block.parts(target)
        if len(parts) != count:
            raise PtxError(f"{instruction.opcode} into {len(parts)} registers")
        num_bytes = count * dtype.itemsize
        if space == "param":
            assert isinstance(source, Address)
            offset = source.offset
            content = np.tile(block.parameters[offset : offset + num_bytes], (len(threads), 1))
        else:
            content = block.load(space, block.address(source, threads), num_bytes)
        numbers = np.ascontiguousarray(content).view(dtype)
        for at, part in enumerate(parts):
            block.write(part, threads, to_bits(numbers[:, at]))

    return load


def _store(space: str, kind: str) -> Operation:
    def store(block: Block, instruction: Instruction, threads: Array) -> None:
        target, source = instruction.operands
        parts = [typed(block.read(part, threads), kind) for part in block.parts(source)]
        content = np.ascontiguousarray(np.stack(parts, axis=1)).view(np.uint8)
        block.store(space, block.address(target, threads), content)

    return store


def _atomic(space: str, way: str, kind: str) -> Operation:
    """Return one thread after the other; each gets what was there before."""
    dtype = dtype_of(kind)

    def atomic(block: Block, instruction: Instruction, threads: Array) -> None:
        target, address, source = instruction.operands
        for at in range(len(threads)):
            one = threads[at : at + 1]
            where = block.address(address, one)
            old = block.load(space, where, dtype.itemsize)
            value = typed(block.read(source, one), kind)
            new = _WAYS[way](int(old.view(dtype)[0, 0]), int(value[0])) % 2**32
            block.store(space, where, np.array([[new]], np.uint32).view(np.uint8))
            block.write(target, one, to_bits(old.view(dtype)[:, 0]))

    return atomic


def _copy(block: Block, instruction: Instruction, threads: Array) -> None:
    target, source, num_bytes, size = instruction.operands
    block.copy_later(
        threads,
        block.address(target, threads),
        block.address(source, threads),
        typed(block.read(size, threads), "u32"),
        int(block.read(num_bytes, threads)[0]),
    )


def _wait(block: Block, instruction: Instruction, threads: Array) -> None:
    (keep,) = instruction.operands
    block.land_copies(threads, int(block.read(keep, threads)[0]))


def _move(block: Block, instruction: Instruction, threads: Array) -> None:
    """Move one register to another; or the halves of one, lowest first, to or from a vector."""
    target, source = instruction.operands
    width = (
        int(instruction.opcode.rpartition(".")[2][1:]) if "pred" not in instruction.opcode else 1
    )
    if isinstance(source, Vector):
        step = width // len(source.parts)
        bits = np.zeros(len(threads), np.uint64)
        for at, part in enumerate(source.parts):
            half = block.read(part, threads) & np.uint64(2**step - 1)
            bits |= half << np.uint64(at * step)
        block.write(target, threads, bits)
        return
    bits = block.read(source, threads)
    if not isinstance(source, Symbol):
        bits = bits & np.uint64(2**width - 1)
    step = width // len(block.parts(target))
    for at, part in enumerate(block.parts(target)):
        block.write(part, threads, bits >> np.uint64(at * step) & np.uint64(2**step - 1))
