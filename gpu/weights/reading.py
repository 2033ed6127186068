"""Reads a tensor's bytes from a file, without mmap.

If a mapped file is truncated, its reader dies by SIGBUS. And mmap would save little: weights are
packed into another layout, so mapped pages wouldn't stay in use, and reading the default model from
the page cache takes a tenth of the time of packing it.
"""

from __future__ import annotations

from io import FileIO
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gpu.weights.blocks import BFLOAT16, Numbers
from trioserve.protocol.errors import ModelLoadError

_PIECE = 1 << 18
"""Numbers checked at a time; so many stay in the cache."""
_EXPONENT = 0x7F80
"""The exponent bits of a bfloat16: all set in infinities and NaN."""


def read_bytes(path: Path, file: FileIO, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]:
    """Read ``num_bytes`` from ``offset`` of ``file``, which is open at ``path``: [num_bytes] uint8.

    Raises:
        ModelLoadError: the file is too short.
        OSError: it can't be read.
    """
    raw = np.empty(num_bytes, dtype=np.uint8)
    room = raw.data
    file.seek(offset)
    while room:
        count = file.readinto(room)  # one call reads 2 GiB at most
        if not count:
            raise ModelLoadError(f"{path} was cut short while it was read: fetch it again")
        room = room[count:]
    return raw


def check_finite(path: Path, name: str, tensor: Numbers) -> None:
    """Refuse the tensor ``name`` of the file at ``path`` if it has infinities or NaN.

    Raises:
        ModelLoadError: it has.
    """
    flat = tensor.reshape(-1)
    for start in range(0, len(flat), _PIECE):
        piece = flat[start : start + _PIECE]
        if piece.dtype == BFLOAT16:
            is_finite = not ((piece.view(np.uint16) & _EXPONENT) == _EXPONENT).any()
        else:
            is_finite = bool(np.isfinite(piece).all())
        if not is_finite:
            raise ModelLoadError(
                f"{path}: tensor {name} holds infinities or NaN: nothing can be computed with it"
            )
