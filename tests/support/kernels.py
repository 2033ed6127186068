"""The compiled kernels in tests: each instruction set that this machine can run."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from gpu.cpu import library as libraries
from gpu.cpu.isa import ISAS, Extension, Isa
from gpu.cpu.library import Library, load_library
from trioserve.protocol.machine import Machine, compiler_version

OTHERS = {
    isa.name: isa
    for isa in (
        Isa("avx2_words", "avx2", (Extension.NONE,)),
        Isa("avx2_vnni_twin", "avx2", (Extension.TWIN,)),
        Isa("amx_emulated", "avx512_bf16", (Extension.TWIN,)),
    )
}
"""Other ways to compute: without an extension that the processor may have, or with its twin."""
MATRIX_UNITS = ("amx", "amx_emulated")
"""Instruction sets with a matrix unit, or its twin."""
_NEEDED = {"avx2_words": "avx2", "avx2_vnni_twin": "avx512", "amx_emulated": "avx512_bf16"}
"""The instruction set that the processor needs for each of them."""


def isas(*, twins: bool = False) -> list[str]:
    """Return the instruction sets that this machine can run; none where nothing is compiled."""
    there = _isas_here()
    return [*there, *(name for name, needed in _NEEDED.items() if twins and needed in there)]


@cache
def _isas_here() -> tuple[str, ...]:
    """Return the instruction sets; once, since it starts the compiler and collection asks often."""
    return () if compiler_version() is None else tuple(Machine().kernel_isas())


def kernels_of_each_isa(names: Sequence[str]) -> list[object]:
    """Return the parameters of a fixture: one that is skipped where there are no kernels."""
    reason = Machine().obstacle_to_kernels() or "there is no C++ compiler"
    return list(names) or [pytest.param("none", marks=pytest.mark.skip(reason=reason))]


@contextmanager
def computing_with(name: str) -> Iterator[Library]:
    """Have ``auto`` stand for an instruction set, or for one of :data:`OTHERS`."""
    before = libraries.prefer(OTHERS.get(name) or ISAS[name])
    try:
        yield load_library()
    finally:
        libraries.prefer(before)


def tile_functions(library: Path) -> dict[str, str]:
    """Return the code of each function that computes a tile of a product, by its name."""
    command = ["objdump", "-d", "-C", "--no-show-raw-insn", str(library)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^[0-9a-f]+ <(.+)>:\n((?:.+\n)*)", listed, re.MULTILINE)
    return {name: code for name, code in found if re.search(r"\bmultiply_\w*(tile|matrix)<", name)}
