"""Guards around the calls into ``tokenizers``.

The library matches clients' texts with models' patterns, in Rust and a C regex engine. It has two
dangers:

- A panic is a BaseException, which ``except Exception`` doesn't catch. A text that makes a pattern
  backtrack too often causes one, such as millions of spaces between two letters.
- Encoding takes up to 350 bytes per character, and the allocator keeps them afterwards.

So each call is inside a block of ``panics_raised`` or :func:`room_to_encode`, and a text has at
most :func:`max_characters`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from trioserve.model_files.native import panics_raised
from trioserve.protocol.gc_tuning import trim_memory

LARGE_CHARACTERS = 1 << 17
"""Texts above this size are encoded one at a time, and their memory is returned at once."""
FEWEST_MAX_CHARACTERS = 1 << 19
"""Lower bound of the limit: encoding this takes 180 MB, which any server has."""
CHARACTERS_PER_TOKEN = 16
"""Upper bound of a prompt's characters per token; usual texts have four or five."""

_large = threading.Lock()


def max_characters(num_tokens: int | None) -> int:
    """Return the limit of a text's characters if it may have ``num_tokens`` tokens."""
    return max(FEWEST_MAX_CHARACTERS, CHARACTERS_PER_TOKEN * (num_tokens or 0))


@contextlib.contextmanager
def room_to_encode(num_characters: int) -> Iterator[None]:
    """Guard a block that encodes ``num_characters``.

    A block for a large text waits until the previous one has ended, so call this in a thread. The
    memory is returned to the system after the block.

    Raises:
        Panic: The tokenizer has panicked.
    """
    if num_characters <= LARGE_CHARACTERS:
        with panics_raised():
            yield
        return
    with _large:
        try:
            with panics_raised():
                yield
        finally:
            trim_memory()
