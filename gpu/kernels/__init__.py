"""The CUDA kernels: ``NAME.cu`` beside ``NAME.py``, which states its parameters and launches it.

A kernel is one ``extern "C"`` function of one ``.cu`` file, compiled alone with its compile-time
choices. It takes one argument, a struct by value that holds raw pointers and numbers, and reads
everything that changes from step to step through those pointers, so that a captured launch can be
replayed.

The same kernels run on a GPU (:mod:`gpu.kernels.device`) and on the CPU
(:mod:`gpu.kernels.emulation`): what launches them knows neither, only :class:`KernelLoader`.

Imported by ``kernels.emulation``, ``lora``, ``models``, ``cuda`` and ``__main__``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import attrs
import numpy as np
import numpy.typing as npt
import torch

FOLDER = Path(__file__).parent

MOST_BLOCKS = (2**31 - 1, 65535, 65535)
"""The largest grid of a launch in each dimension, on every GPU."""

_ELEMENTS = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "e4m3",
    torch.float32: "float",
}


def element_name(dtype: torch.dtype) -> str:
    """Return the name that ``hardware.cuh`` has for a torch dtype."""
    return _ELEMENTS[dtype]


def parameters(*fields: tuple[str, str]) -> np.dtype[np.void]:
    """Return the NumPy twin of a kernel's ``struct Parameters``; pointers are ``"u8"``.

    The compiler checks that both have the same size.
    """
    return np.dtype(list(fields), align=True)


@attrs.frozen(kw_only=True)
class KernelSource:
    """One kernel with everything that is fixed when it is compiled.

    ``defines`` become ``-D`` options; besides them every kernel sees ``PARAMETERS_BYTES`` and
    ``NUM_THREADS``.
    """

    name: str
    """Name of the function; the file is ``name.cu`` unless ``file`` says otherwise."""
    parameters: np.dtype[np.void]
    num_threads: int
    """Threads of a block."""
    defines: tuple[tuple[str, str | int], ...] = ()
    shared_bytes: int = 0
    """Dynamic shared memory of a block."""
    file: str = attrs.field()

    @file.default
    def _own_file(self) -> str:
        return f"{self.name}.cu"

    @property
    def path(self) -> Path:
        """Path of the source."""
        return FOLDER / self.file

    @property
    def macros(self) -> dict[str, str]:
        """Every macro that the compiler is given."""
        return {
            **{name: str(value) for name, value in self.defines},
            "PARAMETERS_BYTES": str(self.parameters.itemsize),
            "NUM_THREADS": str(self.num_threads),
        }

    @property
    def title(self) -> str:
        """``decode_attention<HEAD_DIM=128 ...>``, for tables and messages."""
        choices = " ".join(f"{name}={value}" for name, value in self.defines)
        return f"{self.name}<{choices}>" if choices else self.name


class Kernel(Protocol):
    """A kernel that is ready to run."""

    def launch(self, grid: tuple[int, int, int], parameters: npt.NDArray[Any]) -> None:
        """Launch over ``grid`` blocks on torch's current stream.

        ``parameters`` is a NumPy array of one element of the source's ``parameters`` dtype; its
        bytes are copied before this returns. A grid with a 0 launches nothing, one beyond
        :data:`MOST_BLOCKS` is an error.
        """


class KernelLoader(Protocol):
    """A loader of kernels from their sources, for one device."""

    @property
    def device(self) -> torch.device:
        """Device of all tensors that kernels get pointers to."""

    @property
    def num_multiprocessors(self) -> int:
        """Number of blocks run side by side at least."""

    def load(self, source: KernelSource) -> Kernel:
        """Build ``source``, or find it built, and load it. The same source is loaded once."""
