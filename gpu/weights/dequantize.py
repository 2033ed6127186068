"""ggml's block formats to floating point numbers, a whole run of blocks in each operation.

A block is stored as its scales and then its quants; names of the fields are ggml's (``d`` the
scale, ``m`` or ``dmin`` the minimum, ``qs`` the quants; K-formats have 256 numbers in a block, with
scales of their own inside it). Everything is computed in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from trioserve.model_files.gguf_header import TensorType

__all__ = ["BLOCK_DECODERS", "dequantize"]

_CHUNK_NUMBERS = 1 << 18  # 1 MiB of float32: intermediate results stay in the cache


def dequantize(raw: torch.Tensor, type_: TensorType, dtype: torch.dtype) -> torch.Tensor:
    """The numbers in ``raw`` (uint8, one dimension, whole blocks) as a flat tensor of ``dtype``."""
    plain = _PLAIN.get(type_.name)
    if plain is not None:
        return raw.view(plain).to(dtype, copy=True)
    decode = BLOCK_DECODERS[type_.name]
    blocks = raw.view(-1, type_.block_bytes)
    out = torch.empty(blocks.shape[0], type_.block_numbers, dtype=dtype)
    step = _CHUNK_NUMBERS // type_.block_numbers
    for start in range(0, blocks.shape[0], step):
        chunk = blocks[start : start + step]
        out[start : start + step] = decode(chunk)
    return out.view(-1)


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte ``start`` of every block, as float32 ``[blocks, 1]``."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(qs: torch.Tensor) -> torch.Tensor:
    """``[blocks, groups, n]`` bytes to ``[blocks, groups, 2, n]``: low halves, then high halves."""
    return torch.stack((qs & 15, qs >> 4), dim=2)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    # d, 16 bytes of quants: number i is in the low half of byte i, number i + 16 in the high half.
    quants = _nibbles(blocks[:, None, 2:]).flatten(1).float().sub_(8.0)
    return quants.mul_(_half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    # d, m, 16 bytes of quants as in Q4_0.
    quants = _nibbles(blocks[:, None, 4:]).flatten(1).float()
    return quants.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    # d, 32 signed bytes.
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks, 0))


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    # d, dmin, 12 bytes of eight 6-bit scales and minimums, 128 bytes of quants.
    low, high, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((low & 63, (rest & 15) | ((low >> 2) & 48)), dim=1)
    minimums = torch.cat((high & 63, (rest >> 4) | ((high >> 2) & 48)), dim=1)
    d = (_half(blocks, 0) * scales)[:, :, None]
    dmin = (_half(blocks, 2) * minimums)[:, :, None]
    quants = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).flatten(1, 2).float()
    return quants.mul_(d).sub_(dmin).flatten(1)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    # 128 bytes with the low four bits, 64 with the high two, 16 signed scales, d.
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 2, 4, 32)
    pairs = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    high = torch.cat([(pairs >> shift) & 3 for shift in (0, 2, 4, 6)], dim=2)
    quants = (low | (high << 4)).view(-1, 16, 16).float().sub_(32.0)
    scales = blocks[:, 192:208].view(torch.int8).float() * _half(blocks, 208)
    return quants.mul_(scales[:, :, None]).flatten(1)


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

BLOCK_DECODERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
"""From blocks ``[blocks, block_bytes]`` uint8 to numbers ``[blocks, block_numbers]`` float32."""
