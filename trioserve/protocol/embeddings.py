"""Embeddings in a prompt: rows that stand in place of those of its tokens, and grids of images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import attrs
import ml_dtypes
import numpy as np
import numpy.typing as npt

NumberFormat = Literal["float32", "float16", "bfloat16"]
NUMPY_DTYPES: dict[NumberFormat, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


@attrs.frozen(kw_only=True)
class EmbeddingRows:
    """Embeddings [n, E] from position ``start`` of a prompt on."""

    start: int
    rows: bytes
    """[n, E], contiguous and little-endian."""
    number_format: NumberFormat

    def numbers(self, width: int) -> npt.NDArray[Any]:
        """Return the read-only view [n, width] of the rows.

        Raises:
            ValueError: They aren't so wide.
        """
        return np.frombuffer(self.rows, NUMPY_DTYPES[self.number_format]).reshape(-1, width)


@attrs.frozen(kw_only=True)
class ImageGrid:
    """Tokens of a prompt that are the rows and columns of an image, row after row."""

    start: int
    """Position of the first one in the prompt."""
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        """Position behind the last one."""
        return self.start + self.rows * self.columns


def find_misfit(
    embeddings: Sequence[EmbeddingRows], grids: Sequence[ImageGrid], width: int, num_tokens: int
) -> str:
    """Return what doesn't fit a sequence of ``num_tokens`` tokens; empty if all does.

    Args:
        embeddings: Embeddings in place of its tokens, each to be ``width`` numbers.
        grids: Images among its tokens, to be in order.
    """
    for each in embeddings:
        try:
            stop = each.start + len(each.numbers(width))
        except (ValueError, KeyError):
            return "embeddings of another width"
        if not 0 <= each.start < stop <= num_tokens:
            return "embeddings where it has no tokens"
    end = 0
    for grid in grids:
        if not end <= grid.start < grid.stop <= num_tokens:
            return "an image where it has no tokens"
        end = grid.stop
    return ""
