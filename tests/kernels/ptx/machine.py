"""The state of a block of threads: registers, shared memory, and copies under way.

A register is an array of 64-bit words, one for each thread; the instructions say how many bits
count.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from tests.kernels.ptx.text import (
    Address,
    Entry,
    Immediate,
    Operand,
    PtxError,
    Register,
    Symbol,
    Vector,
)

__all__ = ["WARP", "Array", "Block", "dtype_of", "to_bits", "typed"]

Array = npt.NDArray[Any]
WARP = 32
_SHARED_BASE = 1024  # so that address 0 is never valid
_POISON = 0xFF
_KINDS = {"u": "u", "s": "i", "b": "u", "f": "f"}


def dtype_of(kind: str) -> np.dtype[Any]:
    """Return the NumPy type of a PTX type such as ``u32``."""
    return np.dtype(f"{_KINDS[kind[0]]}{int(kind[1:]) // 8}")


def typed(bits: Array, kind: str) -> Array:
    """Bits as numbers of a PTX type."""
    dtype = dtype_of(kind)
    return bits.astype(f"u{dtype.itemsize}").view(dtype)


def to_bits(numbers: Array) -> Array:
    """Numbers as the words of a register."""
    return np.ascontiguousarray(numbers).view(f"u{numbers.itemsize}").astype(np.uint64)


@attrs.define
class _Copy:
    """``cp.async`` of some threads, which hasn't landed."""

    threads: Array
    groups: Array
    """The group of each copy, among those of its thread."""
    to: Array
    sources: Array
    sizes: Array
    """Bytes that are read; the others become zeros."""
    num_bytes: int


class Block:
    """One block of threads that executes ``entry``."""

    def __init__(
        self,
        entry: Entry,
        num_threads: int,
        special: dict[str, int],
        parameters: bytes,
        dynamic_bytes: int,
    ) -> None:
        self.entry = entry
        self.num_threads = num_threads
        self.parameters = np.frombuffer(parameters, np.uint8)
        self._symbols: dict[str, int] = {}
        end = _SHARED_BASE
        for name, (alignment, size) in entry.shared.items():
            end = -(-end // alignment) * alignment
            self._symbols[name] = end
            end += size or dynamic_bytes
        self._shared = np.full(end, _POISON, np.uint8)
        threads = np.arange(num_threads, dtype=np.uint64)
        self._registers: dict[str, Array] = {
            name: np.full(num_threads, value, np.uint64) for name, value in special.items()
        }
        self._registers["%tid.x"] = threads
        self._registers["%laneid"] = threads % WARP
        self._groups = np.zeros(num_threads, np.int64)
        self._copies: list[_Copy] = []

    def read(self, operand: Operand, threads: Array) -> Array:
        """Return the bits of an operand in ``threads``.

        Raises:
            PtxError: nothing has been written to the register, or there is no such variable.
        """
        match operand:
            case Register(name):
                if name not in self._registers:
                    raise PtxError(f"{self.entry.name}: {name} is read before it is written")
                return self._registers[name][threads]
            case Immediate(bits):
                return np.full(len(threads), bits, np.uint64)
            case Symbol(name):
                if name not in self._symbols:
                    raise PtxError(f"{self.entry.name}: there is no variable {name}")
                return np.full(len(threads), self._symbols[name], np.uint64)
            case _:
                raise PtxError(f"{self.entry.name}: {operand} is no value")

    def write(self, operand: Operand, threads: Array, bits: Array) -> None:
        """Set a register of ``threads``."""
        if not isinstance(operand, Register):
            raise PtxError(f"{self.entry.name}: {operand} is no register")
        if operand.name not in self._registers:
            poison = np.full(self.num_threads, 2**64 - 1, np.uint64)
            self._registers[operand.name] = poison
        self._registers[operand.name][threads] = bits

    def parts(self, operand: Operand) -> tuple[Operand, ...]:
        """Return the registers of a vector, or the one that stands alone."""
        return operand.parts if isinstance(operand, Vector) else (operand,)

    def address(self, operand: Operand, threads: Array) -> Array:
        """Return the addresses that ``[base + offset]`` has in ``threads``."""
        assert isinstance(operand, Address)
        return self.read(operand.base, threads) + np.uint64(operand.offset)

    def load(self, space: str, addresses: Array, num_bytes: int) -> Array:
        """uint8 [threads, num_bytes]."""
        memory, offsets = self._memory(space, addresses, num_bytes)
        return memory[offsets[:, None] + np.arange(num_bytes)]

    def store(self, space: str, addresses: Array, content: Array) -> None:
        """Write uint8 [threads, bytes]."""
        num_bytes = content.shape[1]
        memory, offsets = self._memory(space, addresses, num_bytes)
        memory[offsets[:, None] + np.arange(num_bytes)] = content

    def _memory(self, space: str, addresses: Array, num_bytes: int) -> tuple[Array, Array]:
        """Return the bytes of a space from its lowest address on, and each access's offset."""
        if (addresses % np.uint64(num_bytes)).any():
            raise PtxError(f"{self.entry.name}: an address is no multiple of {num_bytes}")
        low, high = int(addresses.min()), int(addresses.max()) + num_bytes
        if space == "shared":
            if low < _SHARED_BASE or high > len(self._shared):
                raise PtxError(f"{self.entry.name}: {low}..{high} is outside of shared memory")
            return self._shared, addresses.astype(np.int64)
        return np.asarray(_HostMemory(low, high - low)), (addresses - np.uint64(low)).astype(int)

    def copy_later(
        self, threads: Array, to: Array, sources: Array, sizes: Array, num_bytes: int
    ) -> None:
        """Note copies from global to shared memory; they land when they are waited for."""
        groups = self._groups[threads]
        self._copies.append(_Copy(threads, groups, to, sources, sizes, num_bytes))

    def close_copy_group(self, threads: Array) -> None:
        """Put the copies since the last group into one."""
        self._groups[threads] += 1

    def land_copies(self, threads: Array, keep: int) -> None:
        """Finish all groups of ``threads`` but the ``keep`` latest that are closed."""
        waits = np.zeros(self.num_threads, bool)
        waits[threads] = True
        for copy in self._copies:
            lands = waits[copy.threads] & (copy.groups < self._groups[copy.threads] - keep)
            for at in np.flatnonzero(lands):
                content = np.zeros((1, copy.num_bytes), np.uint8)
                if size := int(copy.sizes[at]):
                    source = np.asarray(_HostMemory(int(copy.sources[at]), size))
                    content[0, :size] = source
                self.store("shared", copy.to[at : at + 1], content)
            kept = ~lands
            copy.threads, copy.groups = copy.threads[kept], copy.groups[kept]
            copy.to, copy.sources = copy.to[kept], copy.sources[kept]
            copy.sizes = copy.sizes[kept]


class _HostMemory:
    """Memory of this process by its address; NumPy makes an array of it without a look at it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "version": 3,
        }
