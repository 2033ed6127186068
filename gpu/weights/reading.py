"""Reading a tensor's bytes out of a file, without mapping it.

Whoever cuts a mapped file short ends the process that looks at it, by a signal. And little would be
saved: weights are packed into a layout of their own, so that mapped pages wouldn't stay in use, and
out of the page cache the default model's are read in a tenth of the time that packing them takes.
"""

from __future__ import annotations

from io import FileIO
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trioserve.errors import ModelLoadError

__all__ = ["read_bytes"]


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
