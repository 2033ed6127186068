"""Reading a tensor's bytes out of a file, without mapping it.

A mapped file that is cut short ends the process that reads it, by a signal. And little would be
saved: weights are packed into a layout of their own, so that mapped pages wouldn't stay in use, and
out of the page cache the default model's are read in a tenth of the time that packing them takes.
"""

from __future__ import annotations

from io import FileIO
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gpu.weights.blocks import BFLOAT16, Numbers
from trioserve.protocol.errors import ModelLoadError

_PIECE = 1 << 18
"""Numbers that are looked at together: so many stay in a processor's cache."""
_EXPONENT = 0x7F80
"""The bits of a bfloat16 that are all set in infinities and in what is no number."""


def read_bytes(path: Path, file: FileIO, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]:
    """``num_bytes`` from ``offset`` of ``file``, which is at ``path``: [num_bytes] uint8.

    Raises:
        ModelLoadError: the file ends before.
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
    """Refuse the tensor ``name`` of the file at ``path`` if a number in it isn't finite.

    Raises:
        ModelLoadError: one isn't.
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
