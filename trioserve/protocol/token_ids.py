"""Sets of token ids as columns: sorted int32, each id once, as bytes.

A column of a whole vocabulary is encoded, decoded and shared by a request's outputs at no cost. A
list of as many integers takes tens of milliseconds for each, and forty bytes an id.
:func:`trioserve.protocol.wire.ints` gives the array of a column.
"""

from __future__ import annotations

import array
import bisect
from collections.abc import Iterable


def as_column(ids: Iterable[int] | bytes) -> bytes:
    """Return the column of ``ids``, which may be one already."""
    return ids if isinstance(ids, bytes) else array.array("i", sorted(set(ids))).tobytes()


def count_ids(column: bytes) -> int:
    """Return the number of ids in the set."""
    return len(column) // 4


def has_id(column: bytes, token: int) -> bool:
    """Return True if ``token`` is in the set."""
    ids = memoryview(column).cast("i")
    place = bisect.bisect_left(ids, token)
    return place < len(ids) and ids[place] == token
