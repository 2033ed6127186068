"""The interpreter as a loader of kernels: NVRTC compiles them to PTX, which is then interpreted."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from gpu.kernels import Kernel, KernelSource, nvrtc
from tests.kernels.ptx.grid import run_block
from tests.kernels.ptx.machine import Block
from tests.kernels.ptx.text import PtxError, parse

__all__ = ["InterpretedKernel", "InterpretedLoader", "ptx_of"]


def ptx_of(source: KernelSource, target: str) -> str:
    """Return the PTX of all kernels in the file of ``source``, such as for ``compute_90``."""
    return _ptx(attrs.evolve(source, name="all", shared_bytes=0), target)


@cache
def _ptx(source: KernelSource, target: str) -> str:
    library: Any = importlib.import_module("cupy_backends.cuda.libs.nvrtc")
    unit = nvrtc.unit(source, target)
    headers = tuple(unit.headers.values()), tuple(name.encode() for name in unit.headers)
    program = library.createProgram(unit.text, source.path.name, *headers)
    try:
        options = [x for x in unit.options if x != "--generate-line-info"]
        library.compileProgram(program, tuple(options))
        ptx: bytes = library.getPTX(program)
        return ptx.decode()
    finally:
        library.destroyProgram(program)


class InterpretedLoader:
    """:class:`gpu.kernels.KernelLoader` for the interpreter; memory is that of the CPU.

    Args:
        target: what NVRTC makes PTX for.
        edit: changes the PTX, to plant a mistake.
        together: see :func:`run_block`.
    """

    def __init__(
        self,
        *,
        target: str = "compute_90",
        edit: Callable[[str], str] = str,
        together: bool = False,
    ) -> None:
        self.target = target
        self.edit = edit
        self.together = together
        self.executed: set[str] = set()
        """All opcodes that were executed."""

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @property
    def num_multiprocessors(self) -> int:
        """Do as the emulation does."""
        return 4

    def load(self, source: KernelSource) -> Kernel:
        """See :meth:`gpu.kernels.KernelLoader.load`."""
        return InterpretedKernel(self, source)


class InterpretedKernel:
    """One kernel's PTX."""

    def __init__(self, loader: InterpretedLoader, source: KernelSource) -> None:
        self._loader = loader
        self._source = source
        self._entry = parse(loader.edit(ptx_of(source, loader.target)))[source.name]

    def launch(self, grid: tuple[int, int, int], parameters: npt.NDArray[Any]) -> None:
        """See :meth:`gpu.kernels.Kernel.launch`.

        Raises:
            PtxError: the PTX breaks a rule, or has what the interpreter doesn't know.
        """
        if grid[1:] != (1, 1):
            raise PtxError(f"a grid of {grid}: only its first dimension is interpreted")
        for number in range(grid[0]):
            block = Block(
                self._entry,
                self._source.num_threads,
                {"%ctaid.x": number, "%nctaid.x": grid[0], "%ntid.x": self._source.num_threads},
                parameters.tobytes(),
                self._source.shared_bytes,
            )
            with np.errstate(all="ignore"):
                run_block(block, self._loader.executed, together=self._loader.together)
