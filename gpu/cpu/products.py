"""Matrix products with packed weights, compiled for the CPU: one by one, to test and measure them.

A model's step calls them from C++; see ``csrc/product.h`` for the layout and what is promised.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from types import TracebackType

import attrs
import torch

from gpu.cpu.library import Library, load_library

BLOCK = 32
"""Inputs that share a scale. A product's number of inputs is a multiple of it."""
_MAX_SEGMENTS = 3
_ALIGNMENT = 64


class Kind(IntEnum):
    """A weight's number format; the numbers are those of product.h."""

    BF16 = 0
    Q8_0 = 1
    Q4_0 = 2
    Q4_1 = 3
    W8A8 = 4


GGUF_KINDS = {"Q8_0": Kind.Q8_0, "Q4_0": Kind.Q4_0, "Q4_1": Kind.Q4_1}
"""The types of a GGUF file's tensors that are packed block by block, unchanged."""

_RAW_BLOCK_BYTES = {Kind.Q8_0: 34, Kind.W8A8: 34, Kind.Q4_0: 18, Kind.Q4_1: 20}
_FORMS = {torch.bfloat16: 0, torch.float32: 1, torch.uint8: 2}


class _Segment(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("first", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("packed", ctypes.c_void_p),
    )


class _Product(ctypes.Structure):
    _fields_ = (
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("bias", ctypes.c_void_p),
        ("num_segments", ctypes.c_int64),
        ("segments", _Segment * _MAX_SEGMENTS),
        ("next", ctypes.c_void_p),
    )


class Pool:
    """Threads that compute products together; a context manager that ends them.

    Raises:
        LibraryBuildError: there is no library for this machine.
    """

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads
        self._library = _library()
        self.handle: int | None = self._library.product_pool_open(threads)

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the threads."""
        if self.handle is not None:
            self._library.product_pool_close(self.handle)
            self.handle = None


@attrs.frozen
class PackedWeight:
    """A weight [outputs, inputs] in the layout of its kind."""

    kind: Kind
    outputs: int
    inputs: int
    memory: torch.Tensor  # uint8

    def __attrs_post_init__(self) -> None:
        assert self.memory.data_ptr() % _ALIGNMENT == 0


def packed_bytes(kind: Kind, outputs: int, inputs: int) -> int:
    """Return the size of a packed weight."""
    size: int = _library().product_packed_bytes(kind, outputs, inputs)
    return size


def pack(
    weight: torch.Tensor, kind: Kind, pool: Pool, memory: torch.Tensor | None = None
) -> PackedWeight:
    """Return a weight [outputs, inputs] of bfloat16 or float32, rounded to ``kind``.

    ``memory`` is where it is put, if given: :func:`packed_bytes` from a multiple of 64 on.

    Raises:
        ValueError: the number of inputs is not a multiple of 32, or the dtype is another one.
    """
    if weight.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"a weight of {weight.dtype} can't be packed")
    outputs, inputs = weight.shape
    return _pack(weight, kind, (outputs, inputs), pool, memory)


def pack_blocks(blocks: torch.Tensor, kind: Kind, shape: Sequence[int], pool: Pool) -> PackedWeight:
    """Return a weight of this shape from a GGUF file's blocks (uint8, row by row), exactly.

    W8A8 takes blocks of Q8_0.

    Raises:
        ValueError: the number of inputs is not a multiple of 32, or the blocks are not as many.
    """
    outputs, inputs = shape
    expected = outputs * (inputs // BLOCK) * _RAW_BLOCK_BYTES[kind]
    if blocks.numel() != expected:
        raise ValueError(f"{blocks.numel()} bytes of blocks, {expected} expected")
    return _pack(blocks, kind, (outputs, inputs), pool, None)


def _pack(
    source: torch.Tensor,
    kind: Kind,
    shape: tuple[int, int],
    pool: Pool,
    memory: torch.Tensor | None,
) -> PackedWeight:
    outputs, inputs = shape
    if inputs % BLOCK or inputs == 0:
        raise ValueError(f"a product has {inputs} inputs, not a multiple of {BLOCK}")
    if memory is None:
        memory = torch.empty(packed_bytes(kind, outputs, inputs), dtype=torch.uint8)
    packed = PackedWeight(kind, outputs, inputs, memory)
    source = source.contiguous()
    _library().product_pack(
        *(pool.handle, _FORMS[source.dtype], kind, outputs, inputs),
        *(source.data_ptr(), memory.data_ptr()),
    )
    return packed


class PackedProduct:
    """``x @ weight.T + bias``; the weight is one to three packed ones, one below the other.

    A row's result is the same whatever other rows there are and by however many threads.

    Raises:
        ValueError: the weights have different numbers of inputs, or there are too many.
    """

    def __init__(self, weights: Sequence[PackedWeight], bias: torch.Tensor | None = None) -> None:
        if not 1 <= len(weights) <= _MAX_SEGMENTS:
            raise ValueError(f"a product of {len(weights)} weights")
        if len({weight.inputs for weight in weights}) > 1:
            raise ValueError("the weights of a product have different numbers of inputs")
        self._library = _library()
        self.weights = tuple(weights)
        self.inputs = weights[0].inputs
        self.outputs = sum(weight.outputs for weight in weights)
        if bias is not None:
            bias = bias.float().contiguous()
            if bias.shape != (self.outputs,):
                raise ValueError(f"a bias of {list(bias.shape)} for {self.outputs} outputs")
        self._bias = bias  # the struct points to it
        self.struct = _Product(
            inputs=self.inputs,
            outputs=self.outputs,
            bias=None if bias is None else bias.data_ptr(),
            num_segments=len(weights),
        )
        first = 0
        for segment, weight in zip(self.struct.segments, weights, strict=False):
            segment.kind, segment.first, segment.outputs = weight.kind, first, weight.outputs
            segment.packed = weight.memory.data_ptr()
            first += weight.outputs

    def precedes(self, other: PackedProduct) -> None:
        """Say that ``other``, which must live as long, is computed next: so it is fetched ahead."""
        self.struct.next = ctypes.addressof(other.struct)

    @property
    def nbytes(self) -> int:
        """The bytes of the weights."""
        return sum(weight.memory.nbytes for weight in self.weights)

    def scratch(self, max_rows: int, threads: int) -> torch.Tensor:
        """Memory that :meth:`multiply` may use, for up to so many rows and threads."""
        size = self._library.product_scratch_bytes(ctypes.byref(self.struct), max_rows, threads)
        return torch.empty(size, dtype=torch.uint8)

    def multiply(
        self,
        x: torch.Tensor,
        pool: Pool,
        dtype: torch.dtype = torch.bfloat16,
        *,
        out: torch.Tensor | None = None,
        scratch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[rows, outputs] bfloat16 or float32 for x [rows, inputs] bfloat16.

        ``out`` is written to and ``scratch`` used, if given.

        Raises:
            ValueError: x has another shape or dtype.
        """
        if x.dtype != torch.bfloat16 or x.ndim != 2 or x.shape[1] != self.inputs:
            raise ValueError(f"{x.dtype} {list(x.shape)} for a product of {self.inputs} inputs")
        x = x.contiguous()
        y = torch.empty(len(x), self.outputs, dtype=dtype) if out is None else out
        if scratch is None:
            scratch = self.scratch(len(x), pool.threads)
        self._library.product_multiply(
            *(pool.handle, ctypes.byref(self.struct), x.data_ptr(), len(x), y.data_ptr()),
            *(y.dtype == torch.float32, scratch.data_ptr()),
        )
        return y

    def multiply_gated(self, x: torch.Tensor, pool: Pool) -> torch.Tensor | None:
        """[rows, outputs / 2] bfloat16: silu of the first weight's product, times the second's.

        None where there aren't two weights in bfloat16, or for so many rows no matrix unit.
        """
        x = x.contiguous()
        y = torch.empty(len(x), self.outputs // 2, dtype=torch.bfloat16)
        scratch = self.scratch(len(x), pool.threads)
        computed = self._library.product_multiply_gated(
            *(pool.handle, ctypes.byref(self.struct), x.data_ptr(), len(x), y.data_ptr()),
            scratch.data_ptr(),
        )
        return y if computed else None

    def rows(self, ids: torch.Tensor, pool: Pool) -> torch.Tensor:
        """Return the weight's rows ``ids`` [n], as bfloat16 [n, inputs]. There must be one weight.

        Raises:
            ValueError: there are several weights, or no such row.
        """
        if len(self.weights) != 1:
            raise ValueError("only the rows of a single weight can be gathered")
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.outputs:
            raise ValueError(f"rows {ids.tolist()} of {self.outputs}")
        ids = ids.to(torch.int32).contiguous()
        y = torch.empty(len(ids), self.inputs, dtype=torch.bfloat16)
        self._library.product_gather(
            *(pool.handle, ctypes.byref(self.struct), ids.data_ptr(), len(ids), y.data_ptr())
        )
        return y


def _library() -> Library:
    library = load_library()
    pointer, int32, int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    library.product_pool_open.restype = pointer
    library.product_pool_open.argtypes = [int32]
    library.product_pool_close.argtypes = [pointer]
    library.product_packed_bytes.restype = ctypes.c_uint64
    library.product_packed_bytes.argtypes = [int32, int64, int64]
    library.product_pack.argtypes = [pointer, int32, int32, int64, int64, pointer, pointer]
    library.product_scratch_bytes.restype = ctypes.c_uint64
    library.product_scratch_bytes.argtypes = [pointer, int64, int32]
    library.product_multiply.argtypes = [pointer, pointer, pointer, int64, pointer, int32, pointer]
    library.product_multiply_gated.argtypes = [pointer, pointer, pointer, int64, pointer, pointer]
    library.product_gather.argtypes = [pointer, pointer, pointer, int64, pointer]
    for function in (
        *(library.product_pool_close, library.product_pack, library.product_multiply),
        library.product_gather,
    ):
        function.restype = None
    return library
