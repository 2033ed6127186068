"""The compiled kernels of the CPU, as functions to be called through ctypes."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path
from typing import Any

from gpu.cpu.build import LibraryBuildError, OnProgress, build, is_temporary
from gpu.cpu.isa import ISAS, CpuInstructions, Isa
from trioserve.protocol.machine import ARCHITECTURES, KERNEL_ISAS, Machine

_libraries: dict[str, Library] = {}
"""Loaded libraries by the name of their instruction set."""
_preferred: Isa | None = None
"""Instruction set that ``auto`` stands for; None: the fastest that the processor has."""


class Library(ctypes.CDLL):
    """Functions of one instruction set by name; a caller declares their argument types first.

    Raises:
        LibraryBuildError: the file can't be loaded.
    """

    def __init__(self, path: Path, isa: Isa) -> None:
        self.isa = isa
        try:
            super().__init__(str(path))
        except OSError as error:
            raise LibraryBuildError(f"the compiled kernels can't be loaded: {error}") from error

    def __getitem__(self, name_or_ordinal: Any) -> Any:
        return super().__getitem__(f"{self.isa.kernels}_{name_or_ordinal}")

    def choose(self) -> bool:
        """Return whether this process can compute with the instruction set, as it then does."""
        if self.isa.instructions not in self.instructions():
            return False
        return any(self.extension_choose(int(each)) for each in self.isa.extensions)

    def instructions(self) -> CpuInstructions:
        """Return the instructions that the processor and the operating system allow."""
        detect = super().__getitem__("detected_instructions")
        detect.restype = ctypes.c_uint32
        return CpuInstructions(detect())


def load_library(isa: str = "auto", on_progress: OnProgress | None = None) -> Library:
    """Return the library of an instruction set, built if need be.

    A process computes with one instruction set: the last that was asked for.

    Args:
        isa: one of ``KERNEL_ISAS``, or ``auto`` for the fastest that the processor has.
        on_progress: called while the library is compiled, if it is.

    Raises:
        LibraryBuildError: there is none for this machine; one line says why.
    """
    if isa != "auto":
        wanted = [ISAS[isa]]
    elif _preferred is not None:
        wanted = [_preferred]
    else:
        machine = Machine()
        names = machine.kernel_isas() or ARCHITECTURES[machine.architecture()][:1]
        wanted = [ISAS[name] for name in reversed(names)]
    for each in wanted:
        library = _open(each, on_progress)
        if library.choose():
            return library
    raise LibraryBuildError(f"the processor or its system doesn't allow {wanted[-1].name}")


def prefer(isa: Isa | None) -> Isa | None:
    """Let ``auto`` stand for ``isa``; return what it stood for. None: the fastest there is."""
    global _preferred
    before, _preferred = _preferred, isa
    return before


def _open(isa: Isa, on_progress: OnProgress | None) -> Library:
    library = _libraries.get(isa.name)
    if library is None:
        obstacle = Machine().obstacle_to_kernels(isa.kernels)
        if isa.name in KERNEL_ISAS:
            obstacle = Machine().obstacle_to_kernels(isa.name)
        if obstacle is not None:
            raise LibraryBuildError(obstacle)
        path = build((isa.kernels,), on_progress)
        try:
            library = _libraries[isa.name] = Library(path, isa)
        finally:
            if is_temporary(path):
                shutil.rmtree(path.parent, ignore_errors=True)
    return library


def no_room_for(threads: int) -> str:
    """Return the line for a function of the library that could make nothing to compute with."""
    return (
        f"no memory is left, or no room for {threads} threads: free some memory, or lower "
        "--num-threads"
    )
