"""Dequantization of ggml's block formats, vectorized over blocks.

Field names are ggml's: ``d`` is a block's scale, ``m`` or ``dmin`` its minimum, ``qs`` its quants.
K-formats have blocks of 256 numbers with further scales inside. Everything is computed in float32
and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu.weights.blocks import BFLOAT16, FLOAT16, FLOAT32, Numbers
from trioserve.model_files.gguf_header import TensorType
from trioserve.protocol.machine import Machine

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_CHUNK_NUMBERS = 1 << 18  # 1 MiB of float32, so that intermediate results stay in the cache


def dequantize(raw: Bytes, type_: TensorType, dtype: np.dtype[Any]) -> Numbers:
    """Return the numbers in ``raw``, [bytes] uint8 of whole blocks, as [numbers] ``dtype``."""
    plain = _PLAIN.get(type_.name)
    if plain is not None:
        numbers: Numbers = raw.view(plain).astype(dtype)
        return numbers
    decode = BLOCK_DECODERS[type_.name]
    blocks = raw.reshape(-1, type_.block_bytes)
    out = np.empty((len(blocks), type_.block_numbers), dtype=dtype)
    step = _CHUNK_NUMBERS // type_.block_numbers

    def decode_chunk(start: int) -> None:
        out[start : start + step] = decode(blocks[start : start + step])

    # NumPy releases the GIL in these operations.
    with ThreadPoolExecutor(max(int(Machine().cores()), 1)) as threads:
        for _ in threads.map(decode_chunk, range(0, len(blocks), step)):
            pass
    return out.reshape(-1)


def _half(blocks: Bytes, start: int) -> Floats:
    """Return the float16 at byte ``start`` of every block, as float32 ``[blocks, 1]``."""
    half = np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16)
    return half.astype(np.float32)


def _nibbles(qs: Bytes) -> Bytes:
    """Split bytes [blocks, groups, n] into nibbles [blocks, groups, 2, n], low ones first."""
    return np.stack((qs & 15, qs >> 4), axis=2)


def _floats(quants: npt.NDArray[Any], *shape: int) -> Floats:
    """Return a float32 copy of ``quants`` in another shape."""
    return quants.reshape(shape).astype(np.float32)


def _q4_0(blocks: Bytes) -> Floats:
    # d, 16 bytes of quants: number i is the low nibble of byte i, number i + 16 the high one.
    quants = _floats(_nibbles(blocks[:, None, 2:]), -1, 32)
    quants -= 8
    quants *= _half(blocks, 0)
    return quants


def _q4_1(blocks: Bytes) -> Floats:
    # d, m, 16 bytes of quants as in Q4_0.
    quants = _floats(_nibbles(blocks[:, None, 4:]), -1, 32)
    quants *= _half(blocks, 0)
    quants += _half(blocks, 2)
    return quants


def _q8_0(blocks: Bytes) -> Floats:
    # d, 32 signed bytes.
    quants = _floats(blocks[:, 2:].view(np.int8), -1, 32)
    quants *= _half(blocks, 0)
    return quants


def _q4_k(blocks: Bytes) -> Floats:
    # d, dmin, 12 bytes of eight 6-bit scales and minimums, 128 bytes of quants.
    low, high, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((low & 63, (rest & 15) | ((low >> 2) & 48)), axis=1)
    minimums = np.concatenate((high & 63, (rest >> 4) | ((high >> 2) & 48)), axis=1)
    quants = _floats(_nibbles(blocks[:, 16:].reshape(-1, 4, 32)), -1, 8, 32)
    quants *= (_half(blocks, 0) * scales)[:, :, None]
    quants -= (_half(blocks, 2) * minimums)[:, :, None]
    return quants.reshape(-1, 256)


def _q6_k(blocks: Bytes) -> Floats:
    # 128 bytes with the low four bits, 64 with the high two, 16 signed scales, d.
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    pairs = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    high = np.concatenate([(pairs >> shift) & 3 for shift in (0, 2, 4, 6)], axis=2)
    quants = _floats(low | (high << 4), -1, 16, 16)
    quants -= 32
    scales = blocks[:, 192:208].view(np.int8) * _half(blocks, 208)
    quants *= scales[:, :, None]
    return quants.reshape(-1, 256)


_PLAIN = {"F32": FLOAT32, "F16": FLOAT16, "BF16": BFLOAT16}

BLOCK_DECODERS: dict[str, Callable[[Bytes], Floats]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
"""By type: a function from [blocks, block_bytes] uint8 to [blocks, block_numbers] float32."""
