"""Philox4x32-10, the counter-based random number generator behind every random choice.

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3" (SC'11). A number is a
pure function of (seed, position, sequence index, purpose, lane), so there is no generator state to
keep, to save at a preemption or to share between rows.
"""

from __future__ import annotations

import enum

import numpy as np
import numpy.typing as npt

_ROUNDS = 10
_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint64(0x9E3779B9)
_WEYL_1 = np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


class Purpose(enum.IntEnum):
    """The purpose of a random number: the third word of the counter. Values never change."""

    BLOCK = 0
    """Choice of the block of the vocabulary with the next token; a lane is a block."""
    TOKEN = 1
    """Choice of the token in that block; a lane is a token id."""


def philox4x32(
    counter: npt.NDArray[np.uint32], key: npt.NDArray[np.uint32]
) -> npt.NDArray[np.uint32]:
    """Four random words for each counter.

    Args:
        counter: [N, 4] words.
        key: [N, 2] words.

    Returns:
        [N, 4] words.
    """
    c0, c1, c2, c3 = (counter[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = (key[:, i].astype(np.uint64) for i in range(2))
    for _ in range(_ROUNDS):
        product_0 = _MULTIPLIER_0 * c0
        product_1 = _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (
            (product_1 >> _SHIFT) ^ c1 ^ k0,
            product_1 & _LOW,
            (product_0 >> _SHIFT) ^ c3 ^ k1,
            product_0 & _LOW,
        )
        k0 = (k0 + _WEYL_0) & _LOW
        k1 = (k1 + _WEYL_1) & _LOW
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def uniforms(
    seeds: npt.ArrayLike,
    positions: npt.ArrayLike,
    indices: npt.ArrayLike,
    purpose: Purpose,
    lanes: npt.ArrayLike,
) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1), M for each of N rows, with all 53 bits of a double.

    Args:
        seeds: [N], 0 to 2**64 - 1.
        positions: [N], the position in the sequence of the token that the numbers are for.
        indices: [N], which of its request's sequences the row is.
        purpose: what the numbers are for.
        lanes: [M], or [N, M] where rows differ: which of the numbers for that purpose.

    Returns:
        [N, M] float64, made of the upper 27 bits of the first word and the upper 26 of the second.
    """
    seed = np.asarray(seeds, dtype=np.uint64)[:, None]
    lanes = np.asarray(lanes)
    shape = (len(seed), lanes.shape[-1])
    counter = np.zeros((*shape, 4), dtype=np.uint32)
    counter[:, :, 0] = np.asarray(positions)[:, None]
    counter[:, :, 1] = np.asarray(indices)[:, None]
    counter[:, :, 2] = purpose
    counter[:, :, 3] = lanes
    key = np.empty((*shape, 2), dtype=np.uint32)
    key[:, :, 0] = seed & _LOW
    key[:, :, 1] = seed >> _SHIFT
    words = philox4x32(counter.reshape(-1, 4), key.reshape(-1, 2)).reshape(*shape, 4)
    high = (words[:, :, 0] >> np.uint32(5)).astype(np.float64)
    low = (words[:, :, 1] >> np.uint32(6)).astype(np.float64)
    result: npt.NDArray[np.float64] = (high * 2.0**26 + low) * 2.0**-53
    return result
