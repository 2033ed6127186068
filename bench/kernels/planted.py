"""Run one planted fault on the GPU: ``python -m bench.kernels.planted planted_race``.

compute-sanitizer is to report it. A sanitizer that doesn't has not looked at the kernels.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from gpu.kernels import KernelSource, parameters

FILE = Path(__file__).with_suffix(".cu")
NAMES = ("planted_overflow", "planted_race", "planted_barrier", "planted_gap")
_PARAMETERS = parameters(("a", "u8"), ("out", "u8"), ("num", "i4"))
_THREADS = 64
# More elements than threads; their bytes are no multiple of what allocators round to.
_ELEMENTS = 70


def planted_source(name: str) -> KernelSource:
    """Return the kernel ``name`` of planted.cu."""
    assert name in NAMES, name
    return KernelSource(
        name=name, parameters=_PARAMETERS, num_threads=_THREADS, file=str(FILE.resolve())
    )


def main(name: str) -> None:
    """Launch the kernel of that name; the sanitizer's status is what counts."""
    from gpu.kernels.device import DeviceLoader

    loader = DeviceLoader(torch.device("cuda", torch.cuda.current_device()))
    # Each in an allocation of its own, where PyTorch's cache is off.
    unwritten, out = (torch.empty(_ELEMENTS, device=loader.device) for _ in range(2))
    values = np.zeros(1, _PARAMETERS)
    values["a"], values["out"], values["num"] = unwritten.data_ptr(), out.data_ptr(), _ELEMENTS
    loader.load(planted_source(name)).launch((1, 1, 1), values)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1])
