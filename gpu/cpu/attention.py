"""The compiled attention by itself, on tensors: for tests and measurements.

A model runs it from within its own step, without coming back to Python between layers.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from gpu.attention import CacheShape, QkNorm, StepLayout
from gpu.cpu.library import load_library

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class _Shape(ctypes.Structure):
    """AttentionShape of kv_cache.h."""

    _fields_ = (
        ("num_heads", ctypes.c_int),
        ("num_kv_heads", ctypes.c_int),
        ("head_dim", ctypes.c_int),
        ("page_size", ctypes.c_int),
        ("scale", ctypes.c_float),
    )


class _Step(ctypes.Structure):
    """AttentionStep of kv_cache.h."""

    _fields_ = (
        ("num_rows", _INT),
        ("query_start", _POINTER),
        ("context_lens", _POINTER),
        ("block_tables", _POINTER),
        ("table_stride", _INT),
        ("angles", _POINTER),
    )


class CompiledAttention:
    """:class:`gpu.attention.Attention` for bfloat16 on the CPU, over a cache of its own.

    ``cos_sin`` is the table of :func:`gpu.models.rope.cos_sin_table`. ``fill`` is what the cache
    holds before it is written: any bits will do.

    Raises:
        LibraryBuildError: there is no library for this machine.
    """

    def __init__(
        self,
        shape: CacheShape,
        num_heads: int,
        cos_sin: torch.Tensor,
        *,
        max_tokens: int,
        threads: int = 1,
        fill: float = 0.0,
    ) -> None:
        self._library = library = load_library()
        library.attention_create.restype = _POINTER
        library.attention_create.argtypes = [_POINTER, _INT, ctypes.c_int32]
        library.attention_destroy.argtypes = [_POINTER]
        library.attention_rope_and_write.argtypes = [
            *(_POINTER, _POINTER, _POINTER, _POINTER, ctypes.c_float),
            *(_POINTER, _POINTER),
        ]
        library.attention_attend.argtypes = [
            *(_POINTER, _POINTER, _INT, _INT, _POINTER),
            *(_POINTER, _INT, _POINTER),
        ]
        library.attention_tiles.argtypes = [_POINTER, _POINTER, _INT, _POINTER]
        self._num_heads, self._head_dim = num_heads, shape.head_dim
        self._cos_sin = cos_sin.contiguous()
        size = (shape.num_pages, shape.num_kv_heads, 2 * shape.page_size * shape.head_dim)
        self.cache = [torch.full(size, fill, dtype=torch.bfloat16) for _ in range(shape.num_layers)]
        """The keys and values of each layer, in the order of kv_cache.h."""
        self._step = _Step()
        self._held: list[npt.NDArray[np.generic]] = []
        scale = 1.0 / math.sqrt(shape.head_dim)
        of_model = _Shape(num_heads, shape.num_kv_heads, shape.head_dim, shape.page_size, scale)
        self._handle = library.attention_create(ctypes.byref(of_model), max_tokens, threads)
        if not self._handle:
            raise MemoryError("no memory for attention")

    def close(self) -> None:
        """End the threads."""
        if self._handle:
            self._library.attention_destroy(self._handle)
            self._handle = None

    def begin(self, layout: StepLayout) -> None:
        """See :meth:`gpu.attention.Attention.begin`."""
        start, contexts, tables = (
            np.ascontiguousarray(layout.query_start, dtype=np.int64),
            np.ascontiguousarray(layout.context_lens, dtype=np.int64),
            np.ascontiguousarray(layout.block_tables, dtype=np.int32),
        )
        self._held = [start, contexts, tables]
        self._step = _Step(
            len(contexts), start.ctypes.data, contexts.ctypes.data, tables.ctypes.data,
            tables.shape[1], None,
        )  # fmt: skip

    def rope_and_write(
        self, layer: int, qkv: torch.Tensor, rotate: bool, qk_norm: QkNorm | None = None
    ) -> torch.Tensor:
        """See :meth:`gpu.attention.Attention.rope_and_write`."""
        self._library.attention_rope_and_write(
            self._handle,
            ctypes.byref(self._step),
            self._cos_sin.data_ptr() if rotate else None,
            None if qk_norm is None else qk_norm.weight.data_ptr(),
            0.0 if qk_norm is None else qk_norm.eps,
            *(qkv.data_ptr(), self.cache[layer].data_ptr()),
        )
        return qkv[:, : self._num_heads]

    def attend(self, layer: int, q: torch.Tensor, window: int | None) -> torch.Tensor:
        """See :meth:`gpu.attention.Attention.attend`."""
        return self.attend_layers([layer], q, window)

    def attend_layers(
        self, layers: Sequence[int], q: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        """Attend in several layers in one call, with the same queries; what the last gives."""
        out = torch.empty(q.shape, dtype=q.dtype)
        pages = np.array([self.cache[layer].data_ptr() for layer in layers], dtype=np.int64)
        self._library.attention_attend(
            *(self._handle, ctypes.byref(self._step), window or 0, len(layers)),
            *(pages.ctypes.data, q.data_ptr(), q.stride(0), out.data_ptr()),
        )
        return out

    def tiles(self, window: int | None) -> list[tuple[list[int], int]]:
        """Rows with queries that are computed together, and how many keys these read only once."""
        num_tokens = int(self._held[0][-1])
        found = np.empty((num_tokens, 3), dtype=np.int32)
        self._library.attention_tiles(
            self._handle, ctypes.byref(self._step), window or 0, found.ctypes.data
        )
        tiles: dict[int, tuple[list[int], int]] = {}
        for row, tile, shared in found.tolist():
            tiles.setdefault(tile, ([], shared))[0].append(row)
        return list(tiles.values())
