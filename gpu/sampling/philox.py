"""Philox4x32-10, the counter-based random number generator of all samplers.

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3" (SC'11). A number is a
pure function of (seed, position, sequence index, purpose, lane), so there is no generator state to
keep, or to restore after a preemption.
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
    """The purpose of a random number, part of its counter. Values never change."""

    BLOCK = 0
    """Choice of a block of the vocabulary; a lane is a block."""
    TOKEN = 1
    """Choice of a token in that block; a lane is a token id."""


def philox4x32(
    counter: npt.NDArray[np.uint32], key: npt.NDArray[np.uint32]
) -> npt.NDArray[np.uint32]:
    """Return four random words for each counter: [N, 4], for ``counter`` [N, 4], ``key`` [N, 2]."""
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
    """Return M uniform numbers in [0, 1) for each of N rows: [N, M] float64 with 53 random bits.

    The bits are the upper 27 of the first word and the upper 26 of the second.

    Args:
        seeds: [N], 0 to 2**64 - 1.
        positions: [N], position of the token to sample.
        indices: [N], index of the sequence within its request.
        purpose: the purpose of the numbers.
        lanes: [M], or [N, M] if rows differ: distinguishes numbers of one purpose.
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
