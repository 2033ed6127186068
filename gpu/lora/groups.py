"""A step's tokens, put together by adapter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gpu.slots import Row


def tokens_by_adapter(rows: Sequence[Row]) -> dict[int, npt.NDArray[np.int32]]:
    """Return the places, in increasing order, of the tokens of each adapter's rows.

    The rows' tokens stand one row's after the other's. Those of rows without an adapter are left
    out. Empty in most steps, which costs a look at every row.
    """
    ranges: dict[int, list[tuple[int, int]]] = {}
    place = 0
    for row in rows:
        if row.slot.adapter:
            ranges.setdefault(row.slot.adapter, []).append((place, place + row.num_computed))
        place += row.num_computed
    return {
        adapter: np.concatenate([np.arange(*each, dtype=np.int32) for each in own])
        for adapter, own in ranges.items()
    }
