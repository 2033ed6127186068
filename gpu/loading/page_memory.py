"""Pages in shared memory, on their way from one worker of a host to another.

The engine makes the memory and says which pages go through it
(:mod:`trioserve.scheduler.siblings`). They lie one after the other. Each has a head: what its
content depends on besides tokens, its key, a checksum and its length. A page that is damaged, of
another key or of other weights is noticed, and ends the transfer.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gpu.loading.page_files import checksum_of

_HEAD = struct.Struct("<16s16s16sQ")


def write_pages(
    path: Path, state: bytes, keys: list[bytes], contents: list[npt.NDArray[np.uint8]]
) -> None:
    """Write pages, [B] each, to the memory at ``path``, from its start.

    ``state`` (16 bytes) stands for all that their content depends on besides the tokens.

    Raises:
        OSError: There is no memory for them, or none at ``path``.
    """
    with path.open("r+b") as memory:
        for key, content in zip(keys, contents, strict=True):
            memory.write(_HEAD.pack(state, key, checksum_of(content), len(content)))
            memory.write(content.data)


def read_pages(path: Path, state: bytes, keys: list[bytes]) -> list[npt.NDArray[np.uint8]]:
    """Return the pages that lie at ``path``, up to the first that isn't the one of its key.

    Raises:
        OSError: There is no memory at ``path``.
    """
    found = []
    with path.open("rb") as memory:
        size = path.stat().st_size
        for key in keys:
            head = memory.read(_HEAD.size)
            if len(head) < _HEAD.size or not head.startswith(state + key):
                break
            length = min(_HEAD.unpack(head)[3], size)
            content = np.fromfile(memory, dtype=np.uint8, count=length)
            if head != _HEAD.pack(state, key, checksum_of(content), len(content)):
                break
            found.append(content)
    return found
