"""The instruction set of the compiled kernels, chosen for a whole process: ``csrc/body.h``."""

from __future__ import annotations

import ctypes
from enum import IntEnum

from gpu.cpu.library import Library
from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.machine import KERNEL_ISAS


class KernelIsa(IntEnum):
    """Implementation of the matrix products; the numbers are those of body.h."""

    AVX512_BF16 = 0
    AMX = 1
    AMX_EMULATED = 2


def choose_isa(library: Library, isa: str) -> None:
    """Have all products of this process computed with ``isa``: one of ``KERNEL_ISAS``, or ``auto``
    for the fastest.

    Raises:
        ModelLoadError: the processor or the operating system doesn't allow it.
    """
    chosen = library.body_fastest() if isa == "auto" else KERNEL_ISAS.index(isa)
    if not choose_kernels(library, KernelIsa(chosen)):
        raise ModelLoadError(
            f"--cpu-isa {isa} can't be had: the processor lacks it, or the operating system "
            "doesn't allow it: leave --cpu-isa at auto"
        )


def choose_kernels(library: Library, isa: KernelIsa) -> bool:
    """Return whether this process can compute with ``isa``, which it then does."""
    library.body_choose.argtypes = [ctypes.c_int32]
    return bool(library.body_choose(isa))


def current_isa(library: Library) -> str:
    """Return the instruction set that computes this process's products."""
    return KERNEL_ISAS[library.body_current()]
