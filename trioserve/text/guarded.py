"""Guards around the calls into ``tokenizers``.

The library matches clients' texts with models' patterns, in Rust and a C regex engine. It has two
dangers:

- A panic of its code is a BaseException, which no ``except Exception`` catches. A text that makes a
  pattern backtrack too often causes one: millions of spaces between two letters.
- It takes up to 350 bytes for each character while it encodes, and the allocator keeps them
  afterwards.

So each call into it stands in a block of ``panics_raised`` or :func:`room_to_encode`, and a text
has at most :func:`max_characters`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from trioserve.model_files.native import panics_raised
from trioserve.protocol.gc_tuning import give_back

LARGE_CHARACTERS = 1 << 17
"""Texts beyond this size are encoded one at a time, and their memory is returned at once."""
FEWEST_MAX_CHARACTERS = 1 << 19
"""Lower bound of the limit: encoding this much takes 180 MB, which any server has."""
CHARACTERS_PER_TOKEN = 16
"""More characters than a prompt's tokens have on average; usual texts have four or five."""

_large = threading.Lock()


def max_characters(num_tokens: int | None) -> int:
    """Return the most characters of a text that may have at most ``num_tokens`` tokens."""
    return max(FEWEST_MAX_CHARACTERS, CHARACTERS_PER_TOKEN * (num_tokens or 0))


@contextlib.contextmanager
def room_to_encode(num_characters: int) -> Iterator[None]:
    """Guard a block that encodes ``num_characters``.

    A block for a large text waits until the one before has ended, so call this in a thread. The
    memory is returned to the system after the block.

    Raises:
        Panic: the tokenizer has panicked.
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
            give_back()
