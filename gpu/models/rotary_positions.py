"""M-RoPE: rotary positions with a time, a row and a column (Wang et al. 2024, arXiv:2409.12191).

Each rotary frequency turns by one of the three, which are the same for a token of text. Those of an
image's tokens begin at the position behind the text before it; rows and columns then count up, and
the time stands still. In a video, the time counts up from frame to frame. The text behind either
goes on at the largest position plus one. So it has smaller positions than places in the sequence.

The models were trained so. transformers 5 leaves the time out where the text goes on, and so has
other positions behind a video that is longer than its frames are wide.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gpu.slots import Row
from trioserve.model_files import ModelConfig
from trioserve.protocol.embeddings import ImageGrid

Positions = npt.NDArray[np.int64]
"""[T, 3]: time, row and column of each token."""


def positions_of(rows: Sequence[Row]) -> Positions | None:
    """Return the rotary positions of the tokens of ``rows``, one row after the other.

    None if they are the tokens' places in their sequences, because no row has an image or a video.
    """
    if not any(row.slot.grids for row in rows):
        return None
    return np.concatenate(
        [rotary_positions(row.slot.grids, row.start, row.stop) for row in rows], axis=0
    )


def rotary_positions(grids: Sequence[ImageGrid], start: int, stop: int) -> Positions:
    """Return the rotary positions of the tokens from ``start`` to before ``stop``.

    ``grids`` are the images and videos of their sequence, in order.
    """
    positions = np.arange(start, stop)[:, None].repeat(3, axis=1)
    for grid in grids:
        if grid.start >= stop:
            break
        first, last = max(grid.start, start), min(grid.stop, stop)
        if first < last:
            places = np.arange(first, last) - grid.start
            inside = positions[first - start : last - start]
            inside -= places[:, None]
            frames, rest = np.divmod(places, grid.rows * grid.columns)
            inside[:, 0] += grid.times[frames]
            inside[:, 1] += rest // grid.columns
            inside[:, 2] += rest % grid.columns
        positions[max(grid.stop - start, 0) :] += grid.num_positions - (grid.stop - grid.start)
    return positions


def axes_of(config: ModelConfig) -> Positions | None:
    """Return which position each column of the table of cosines and sines takes: [head_dim].

    None if all take a token's place in its sequence.
    """
    if not config.mrope_section:
        return None
    return np.tile(np.repeat(np.arange(3), config.mrope_section), 2)


def angles_at(
    positions: Positions | None, table: npt.NDArray[np.float32], config: ModelConfig
) -> npt.NDArray[np.float32] | None:
    """Return the cosines and sines [T, head_dim] of rotary positions, contiguous; None of None.

    ``table`` is that of :func:`gpu.models.rope.cos_sin_table`.
    """
    if positions is None:
        return None
    # NumPy's result has the order of the indices in memory.
    taken = np.ascontiguousarray(positions[:, axes_of(config)])
    return np.ascontiguousarray(np.take_along_axis(table, taken, axis=0))
