"""Guards around the calls into ``tokenizers``.

The library reads clients' texts with models' patterns, in Rust over an engine of regexes in C. Two
things are its own:

- A panic of its code is a BaseException, which no ``except Exception`` catches. One comes of a text
  that makes a pattern try too often: millions of spaces between two letters.
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
"""Texts beyond this size are encoded one at a time, and what they took is given back."""
FEWEST_MAX_CHARACTERS = 1 << 19
"""A bound that is low enough for the memory of any server: encoding as many takes 180 MB."""
CHARACTERS_PER_TOKEN = 16
"""More than the tokens of a prompt have on average; usual texts have four or five."""

_large = threading.Lock()


def max_characters(num_tokens: int | None) -> int:
    """Return the most characters of a text that is to give at most ``num_tokens``."""
    return max(FEWEST_MAX_CHARACTERS, CHARACTERS_PER_TOKEN * (num_tokens or 0))


@contextlib.contextmanager
def room_to_encode(num_characters: int) -> Iterator[None]:
    """Guard a block that encodes ``num_characters``.

    A block for a large text waits for the one before, so call it in a thread. Its memory is given
    back behind the block.

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
