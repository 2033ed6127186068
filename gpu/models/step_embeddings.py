"""The embeddings of a step that stand in place of those of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from gpu.slots import Row


@attrs.frozen(eq=False)
class StepEmbeddings:
    """Embeddings of a step with their places among its tokens."""

    places: npt.NDArray[np.int64]  # [n]
    rows: npt.NDArray[np.float32]  # [n, E]


def embeddings_of(
    rows: Sequence[Row], firsts: npt.NDArray[np.integer[Any]], width: int
) -> StepEmbeddings | None:
    """Return the embeddings of ``rows``, E = ``width``; None if they have none.

    ``firsts`` begins with the places of the rows' first tokens in the step.
    """
    if not any(row.slot.embeddings for row in rows):
        return None
    places: list[npt.NDArray[np.int64]] = []
    found: list[npt.NDArray[np.float32]] = []
    for row, first in zip(rows, firsts, strict=False):
        for embedded in row.slot.embeddings:
            numbers = embedded.numbers(width)
            start = max(embedded.start, row.start)
            stop = min(embedded.start + len(numbers), row.end)
            if start < stop:
                places.append(np.arange(start, stop) + (first - row.start))
                part = numbers[start - embedded.start : stop - embedded.start]
                found.append(part.astype(np.float32))
    return StepEmbeddings(np.concatenate(places), np.concatenate(found)) if places else None
