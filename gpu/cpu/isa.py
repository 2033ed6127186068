"""Instruction sets of the compiled kernels: their names in the library, and their extensions."""

from __future__ import annotations

from enum import IntEnum, IntFlag

import attrs

from trioserve.protocol.machine import KERNEL_ISAS


class Extension(IntEnum):
    """Instructions for products that only some processors of an instruction set have.

    The numbers are those of ``csrc/extension.h``.
    """

    NONE = 0
    OWN = 1
    TWIN = 2


class CpuInstructions(IntFlag):
    """Instructions that a process can use; the numbers are those of ``csrc/detection.h``."""

    AVX2 = 1
    AVX512 = 2
    AVX512_BF16 = 4
    AMX = 8
    AVX_VNNI = 16
    NEON = 32
    NEON_BF16 = 64


@attrs.frozen
class Isa:
    """An instruction set that a process can compute with."""

    name: str
    kernels: str
    """The instruction set that its kernels are compiled for; their names begin with it."""
    extensions: tuple[Extension, ...] = (Extension.NONE,)
    """Extensions of which one is needed, the fastest first."""

    @property
    def instructions(self) -> CpuInstructions:
        """Instructions that the kernels consist of, without an extension's."""
        return CpuInstructions[self.kernels.upper()]


_ALL = (
    Isa("avx2", "avx2", (Extension.OWN, Extension.NONE)),
    Isa("avx512", "avx512"),
    Isa("avx512_bf16", "avx512_bf16"),
    Isa("amx", "avx512_bf16", (Extension.OWN,)),
    Isa("neon", "neon"),
    Isa("neon_bf16", "neon_bf16"),
)
ISAS = {isa.name: isa for isa in _ALL}
"""An instruction set for each of ``KERNEL_ISAS``."""
assert tuple(ISAS) == KERNEL_ISAS
