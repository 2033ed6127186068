"""The header of a GGUF file: metadata, and the place of each tensor.

The file is read, not mapped: if a mapped file is truncated, its reader is killed. Memory is
allocated only for content that the file has.

Layout (version 2 and 3, little-endian): the magic ``GGUF``, the version, the numbers of tensors and
of metadata entries, the entries (key, type, value), the tensors' entries (name, dimensions, type,
offset), padding, data. Strings follow their 64-bit length. The reader of the gguf package makes
several NumPy arrays for each token of the vocabulary and takes seconds. This one takes tens of
milliseconds.
"""

from __future__ import annotations

import itertools
import math
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, Final

import attrs
import numpy as np
import numpy.typing as npt

from trioserve.protocol.errors import ModelLoadError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS: Final[dict[int, np.dtype[Any]]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_READ_BUFFER = 1 << 20
_MAX_HEADER_BYTES = 256 << 20
"""Largest header: ten times the size of the largest vocabularies."""
_MAX_ENTRIES = 1 << 16
_MAX_TENSORS = 1 << 17
_MAX_TEXTS = 1 << 22
"""Most texts in one array; the longest arrays are a vocabulary's merges."""
_MIN_ALIGNMENT, _MAX_ALIGNMENT = 8, 1 << 20


@attrs.frozen
class TensorType:
    """The storage of a tensor: blocks with a number of elements and a number of bytes."""

    name: str
    block_numbers: int
    block_bytes: int


TENSOR_TYPES: Final = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    8: TensorType("Q8_0", 32, 34),
    12: TensorType("Q4_K", 256, 144),
    14: TensorType("Q6_K", 256, 210),
    30: TensorType("BF16", 1, 2),
}
"""Supported types, by their numbers in the format."""


@attrs.frozen
class GGUFTensor:
    """One tensor: its shape in torch's order (rows first), and its bytes in the file."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int
    num_bytes: int


@attrs.frozen
class GGUFHeader:
    """Metadata by key, and tensors by name. Texts' arrays are lists, numbers' are NumPy arrays.

    No two tensors share a byte, so together they are no larger than the file.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    data_offset: int

    def text(self, key: str, default: str | None = None) -> str | None:
        """Return the text under ``key``; ``default`` without one.

        Raises:
            ModelLoadError: The value has another type.
        """
        value = self.metadata.get(key, default)
        if value is not None and not isinstance(value, str):
            raise self.wrong_type(key)
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return the truth value under ``key``; ``default`` without one.

        Raises:
            ModelLoadError: The value has another type.
        """
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong_type(key)
        return value

    def wrong_type(self, key: str) -> ModelLoadError:
        """Return the error for a value of the wrong type under ``key``."""
        return ModelLoadError(f"{self.path} is damaged: {key} has the wrong type; fetch it again")

    def texts(self, key: str) -> list[str]:
        """Return the array of texts under ``key``; empty if there is none."""
        value = self.metadata.get(key)
        return value if isinstance(value, list) else []

    def numbers(self, key: str) -> npt.NDArray[Any]:
        """Return the array of numbers under ``key``; empty if there is none."""
        value = self.metadata.get(key)
        return value if isinstance(value, np.ndarray) else np.empty(0)


def read_header(path: Path) -> GGUFHeader:
    """Read and check the header of a GGUF file.

    Raises:
        ModelLoadError: The file isn't a GGUF file, is damaged or truncated, or has an unsupported
            tensor type.
    """
    try:
        with path.open("rb", buffering=_READ_BUFFER) as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise ModelLoadError(f"{path} is no GGUF file: give another, or fetch it again")
            return _Reader(path, file).read()
    except OSError as error:
        raise ModelLoadError(f"{path} can't be read: {error.strerror}") from error


class _Reader:
    """A reader at a position in the file, which every read moves."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.file = file
        self.size = os.fstat(file.fileno()).st_size
        self.position = len(_MAGIC)

    def read(self) -> GGUFHeader:
        try:
            return self._read()
        except UnicodeDecodeError as error:
            raise self.damaged("a text in its header is no UTF-8") from error

    def _read(self) -> GGUFHeader:
        version = self.u32()
        if version & 0xFFFF == 0:
            raise ModelLoadError(f"{self.path} is a big-endian GGUF file: use a little-endian one")
        if version not in _VERSIONS:
            raise ModelLoadError(
                f"{self.path} is GGUF version {version}: versions 2 and 3 are read"
            )
        num_tensors = self.count("tensors", _MAX_TENSORS)
        num_entries = self.count("entries", _MAX_ENTRIES)
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self.text()
            if key in metadata:
                raise self.damaged(f"it holds {key} twice")
            metadata[key] = self.value(self.u32())
        parts = metadata.get("split.count", 1)
        if not isinstance(parts, int) or parts > 1:
            raise ModelLoadError(
                f"{self.path} is one part of a split GGUF file: merge the parts with "
                "llama-gguf-split --merge"
            )
        entries = [self.tensor_entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if (
            not isinstance(alignment, int)
            or not _MIN_ALIGNMENT <= alignment <= _MAX_ALIGNMENT
            or alignment & (alignment - 1)
        ):
            raise self.damaged(f"its alignment is {alignment}")
        start = -(-self.position // alignment) * alignment
        tensors = {entry[0]: self.tensor(start, alignment, *entry) for entry in entries}
        if len(tensors) != num_tensors:
            raise self.damaged("it holds two tensors of one name")
        self.check_apart(tensors.values())
        return GGUFHeader(self.path, metadata, tensors, start)

    def u32(self) -> int:
        (value,) = _U32.unpack(self.raw(4))
        return int(value)

    def u64(self) -> int:
        (value,) = _U64.unpack(self.raw(8))
        return int(value)

    def count(self, what: str, most: int) -> int:
        """Read a count and check it before the items are read. A sparse file can have any count."""
        value = self.u64()
        if value > most:
            raise self.damaged(f"it has {value} {what}, and at most {most} are read")
        return value

    def raw(self, size: int) -> bytes:
        self.position += size
        if self.position > _MAX_HEADER_BYTES:
            raise self.damaged(f"its header has more than {_MAX_HEADER_BYTES} bytes")
        value = self.file.read(size) if self.position <= self.size else b""
        if len(value) < size:
            raise self.damaged("it ends inside its header")
        return value

    def text(self) -> str:
        return self.raw(self.u64()).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self.array(self.u32(), self.u64())
        dtype = _SCALARS.get(kind)
        if dtype is None:
            raise self.damaged(f"a value in its header has the unknown type {kind}")
        return np.frombuffer(self.raw(dtype.itemsize), dtype)[0].item()

    def array(self, kind: int, length: int) -> Any:
        if kind == _STRING:
            if length > _MAX_TEXTS:
                raise self.damaged(f"an array of {length} texts; at most {_MAX_TEXTS} are read")
            return self.texts(length)
        dtype = _SCALARS.get(kind)
        if dtype is None:
            raise self.damaged(f"an array in its header has the unknown type {kind}")
        return np.frombuffer(self.raw(dtype.itemsize * length), dtype)

    def texts(self, length: int) -> list[str]:
        """Read texts like :meth:`text`, in half the time: a tokenizer may have 100,000."""
        read, unpack = self.file.read, _U64.unpack
        most = min(self.size, _MAX_HEADER_BYTES)
        texts: list[str] = []
        position = self.position
        for _ in range(length):
            head = read(_U64.size)
            size = unpack(head)[0] if len(head) == _U64.size else most
            end = position + _U64.size + size
            value = read(size) if end <= most else b""
            if end > most or len(value) < size:
                self.position = self.file.seek(position)
                texts.append(self.text())  # It raises the error.
                end = self.position
            else:
                texts.append(value.decode("utf-8"))
            position = end
        self.position = position
        return texts

    def tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return a tensor's name, shape (rows first), type number, and offset in the data."""
        name = self.text()
        num_dimensions = self.u32()
        if num_dimensions > 4:
            raise self.damaged(f"tensor {name} has {num_dimensions} dimensions")
        shape = tuple(self.u64() for _ in range(num_dimensions))
        return name, shape[::-1], self.u32(), self.u64()

    def tensor(
        self,
        start: int,
        alignment: int,
        name: str,
        shape: tuple[int, ...],
        kind: int,
        offset: int,
    ) -> GGUFTensor:
        type_ = TENSOR_TYPES.get(kind)
        if type_ is None:
            known = ", ".join(known.name for known in TENSOR_TYPES.values())
            raise ModelLoadError(
                f"{self.path}: tensor {name} has the type {_type_name(kind)}, which isn't read; "
                f"use a file of {known}"
            )
        numbers = math.prod(shape)
        if not shape or shape[-1] % type_.block_numbers:
            raise self.damaged(f"the rows of tensor {name} are no whole blocks of {type_.name}")
        num_bytes = numbers // type_.block_numbers * type_.block_bytes
        if offset % alignment:
            raise self.damaged(f"tensor {name} isn't aligned to {alignment} bytes")
        end = start + offset + num_bytes
        if end > self.size:
            raise ModelLoadError(
                f"{self.path} is truncated: tensor {name} ends at byte {end} of a file of "
                f"{self.size}; fetch it again"
            )
        return GGUFTensor(name, shape, type_, start + offset, num_bytes)

    def check_apart(self, tensors: Iterable[GGUFTensor]) -> None:
        """Refuse tensors that share bytes: with them a small file could be a model of any size."""
        in_order = sorted(tensors, key=lambda tensor: (tensor.offset, tensor.num_bytes))
        for before, after in itertools.pairwise(in_order):
            if before.offset + before.num_bytes > after.offset:
                raise self.damaged(f"the tensors {before.name} and {after.name} overlap")

    def damaged(self, reason: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path} is damaged: {reason}; fetch it again")


def _type_name(kind: int) -> str:
    """Return the name of an unsupported type; only this error imports the gguf package."""
    from gguf.constants import GGMLQuantizationType

    try:
        return str(GGMLQuantizationType(kind).name)
    except ValueError:
        return f"number {kind}"
