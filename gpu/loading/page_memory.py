"""Pages on their way from one worker to another, through shared memory or in a message.

The engine says which pages go which way (:mod:`trioserve.scheduler.siblings`), and makes the
memory. They lie one after the other. Each has a head: what its
content depends on besides tokens, its key, a checksum and its length. A page that is damaged, of
another key or of other weights is noticed, and ends the transfer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from io import BufferedIOBase

import numpy as np

from gpu.executor import Content
from gpu.loading.page_files import checksum_of

MOST_BYTES = 1 << 30
"""Most bytes of a page; a head with more is damaged."""
_HEAD = struct.Struct("<16s16sIQ")


def write_pages(
    memory: BufferedIOBase, state: bytes, keys: Sequence[bytes], contents: Iterable[Content]
) -> None:
    """Write pages to ``memory``.

    ``state`` (16 bytes) stands for all that their content depends on besides the tokens.

    Raises:
        OSError: There is no room for them.
    """
    for key, content in zip(keys, contents, strict=True):
        memory.write(_HEAD.pack(state, key, checksum_of(content), len(content)))
        memory.write(content.data)


def read_pages(memory: BufferedIOBase, state: bytes, keys: Sequence[bytes]) -> Iterator[Content]:
    """Yield the pages that lie in ``memory``, up to the first that isn't the one of its key."""
    for key in keys:
        head = memory.read(_HEAD.size)
        if len(head) < _HEAD.size or not head.startswith(state + key):
            return
        length = _HEAD.unpack(head)[3]
        if length > MOST_BYTES:
            return
        content = np.empty(length, dtype=np.uint8)
        is_whole = memory.readinto(content.data) == length
        if not is_whole or head != _HEAD.pack(state, key, checksum_of(content), length):
            return
        yield content
