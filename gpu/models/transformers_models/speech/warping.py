"""Dynamic time warping: the cheapest way through a matrix of tokens and frames of audio."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def first_frames(costs: npt.NDArray[np.float64]) -> list[int]:
    """Return the frame at which each token begins on the cheapest path.

    A path goes from the first token and frame to the last ones. Each step leads to the next token,
    to the next frame, or to both.

    Args:
        costs: Costs [T, S] of each token at each frame; none is NaN.

    Returns:
        T frames, in order; the first is 0.
    """
    # A token is at the frames from some first one on. The cost up to a later frame is that of the
    # way to its first one, and a difference of sums. So a whole row is a running minimum.
    frames = np.arange(costs.shape[1])
    reached = np.cumsum(costs[0])
    firsts, is_diagonal = [], []
    for row in costs[1:]:
        sums = np.cumsum(row)
        diagonal = np.concatenate([[np.inf], reached[:-1]])
        ways = np.minimum(diagonal, reached) - (sums - row)
        least = np.minimum.accumulate(ways)
        is_first = np.concatenate([[True], ways[1:] < least[:-1]])
        firsts.append(np.maximum.accumulate(np.where(is_first, frames, 0)))
        is_diagonal.append(diagonal <= reached)
        reached = sums + least
    found = []
    frame = len(frames) - 1
    for of_frame, from_diagonal in zip(reversed(firsts), reversed(is_diagonal), strict=True):
        frame = int(of_frame[frame])
        found.append(frame)
        frame -= int(from_diagonal[frame])
    return [0, *reversed(found)]
