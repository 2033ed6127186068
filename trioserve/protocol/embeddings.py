"""Embeddings in a prompt: rows that stand in place of those of its tokens, and their grids."""

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
    """Tokens of a prompt that are the rows and columns of an image, row after row.

    Those of a video are the images of its frames, one after another.
    """

    start: int
    """Position of the first one in the prompt."""
    rows: int
    columns: int
    frames: int = 1
    interval: float = 1.0
    """Rotary positions from one frame to the next."""

    @property
    def stop(self) -> int:
        """Position behind the last one."""
        return self.start + self.frames * self.rows * self.columns

    @property
    def times(self) -> npt.NDArray[np.int64]:
        """Rotary positions of the frames, from 0 on.

        Models are trained with the products of float32.
        """
        products = np.arange(self.frames, dtype=np.float32) * np.float32(self.interval)
        return products.astype(np.int64)

    @property
    def num_positions(self) -> int:
        """Number of rotary positions before that of the token behind it."""
        return max(self.rows, self.columns, int(self.times[-1]) + 1)


def find_misfit(
    embeddings: Sequence[EmbeddingRows], grids: Sequence[ImageGrid], width: int, num_tokens: int
) -> str:
    """Return what doesn't fit a sequence of ``num_tokens`` tokens; empty if all does.

    Args:
        embeddings: Embeddings in place of its tokens, each to be ``width`` numbers.
        grids: Images and videos among its tokens, to be in order. None may have more rotary
            positions than tokens, so that there are angles for all of them.
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
        if grid.num_positions > grid.stop - grid.start:
            return "an image with more positions than tokens"
        end = grid.stop
    return ""
