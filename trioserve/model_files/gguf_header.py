"""The header of a GGUF file: metadata, and where each tensor lies.

Layout (version 2 and 3, little-endian): the magic ``GGUF``, the version, the numbers of tensors and
of metadata entries, the entries (key, type, value), the tensors' entries (name, dimensions, type,
offset), padding, data. Strings have a 64-bit length in front. The gguf package has a reader too;
it makes several numpy arrays for each token of the vocabulary and so takes seconds for what is done
here in some tens of milliseconds.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt

from trioserve.errors import ModelLoadError

__all__ = ["TENSOR_TYPES", "GGUFHeader", "GGUFTensor", "TensorType", "read_header"]

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


@attrs.frozen
class TensorType:
    """How a tensor's numbers are stored: blocks of so many numbers in so many bytes."""

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
"""The types that are read, by their numbers in the format."""


@attrs.frozen
class GGUFTensor:
    """One tensor: its shape as torch writes it (rows first), and its bytes in the file."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int
    num_bytes: int


@attrs.frozen
class GGUFHeader:
    """Metadata by key (arrays of texts are lists, of numbers numpy arrays), tensors by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    data_offset: int

    def texts(self, key: str) -> list[str]:
        """The array of texts under ``key``; empty where there is none."""
        value = self.metadata.get(key)
        return value if isinstance(value, list) else []

    def numbers(self, key: str) -> npt.NDArray[Any]:
        """The array of numbers under ``key``; empty where there is none."""
        value = self.metadata.get(key)
        return value if isinstance(value, np.ndarray) else np.empty(0)


def read_header(path: Path) -> GGUFHeader:
    """Read and check the header of a GGUF file.

    Raises:
        ModelLoadError: it is no GGUF file, damaged, truncated, or has a tensor type not read.
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != _MAGIC:
                raise ModelLoadError(f"{path} is no GGUF file: give another, or fetch it again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).read()
    except OSError as error:
        raise ModelLoadError(f"{path} can't be read: {error.strerror}") from error


class _Reader:
    """A position in the file's bytes; every read moves it, none goes past the end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.position = len(_MAGIC)

    def read(self) -> GGUFHeader:
        try:
            return self._read()
        except struct.error as error:
            raise self.damaged("it ends inside its header") from error
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
        num_tensors, num_entries = self.u64(), self.u64()
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self.text()
            metadata[key] = self.value(self.u32())
        if metadata.get("split.count", 0) > 1:
            raise ModelLoadError(
                f"{self.path} is one part of a split GGUF file: merge the parts with "
                "llama-gguf-split --merge"
            )
        entries = [self.tensor_entry() for _ in range(num_tensors)]
        alignment = int(metadata.get("general.alignment", 32))
        if alignment <= 0 or alignment & (alignment - 1):
            raise self.damaged(f"its alignment is {alignment}")
        start = -(-self.position // alignment) * alignment
        tensors = {entry[0]: self.tensor(start, *entry) for entry in entries}
        if len(tensors) != num_tensors:
            raise self.damaged("it holds two tensors of one name")
        return GGUFHeader(self.path, metadata, tensors, start)

    def u32(self) -> int:
        (value,) = _U32.unpack_from(self.data, self.position)
        self.position += 4
        return int(value)

    def u64(self) -> int:
        (value,) = _U64.unpack_from(self.data, self.position)
        self.position += 8
        return int(value)

    def raw(self, size: int) -> bytes:
        end = self.position + size
        if end > len(self.data):
            raise self.damaged("it ends inside its header")
        value = self.data[self.position : end]
        self.position = end
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
            return [self.text() for _ in range(length)]
        dtype = _SCALARS.get(kind)
        if dtype is None:
            raise self.damaged(f"an array in its header has the unknown type {kind}")
        return np.frombuffer(self.raw(dtype.itemsize * length), dtype)

    def tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape (rows first), number of the type, offset from the start of the data."""
        name = self.text()
        num_dimensions = self.u32()
        if num_dimensions > 4:
            raise self.damaged(f"tensor {name} has {num_dimensions} dimensions")
        shape = tuple(self.u64() for _ in range(num_dimensions))
        return name, shape[::-1], self.u32(), self.u64()

    def tensor(
        self, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int
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
        end = start + offset + num_bytes
        if end > len(self.data):
            raise ModelLoadError(
                f"{self.path} is truncated: tensor {name} ends at byte {end} of a file of "
                f"{len(self.data)}; fetch it again"
            )
        return GGUFTensor(name, shape, type_, start + offset, num_bytes)

    def damaged(self, reason: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path} is damaged: {reason}; fetch it again")


def _type_name(kind: int) -> str:
    """The name of a type that isn't read; the package is loaded for this message alone."""
    from gguf.constants import GGMLQuantizationType

    try:
        return str(GGMLQuantizationType(kind).name)
    except ValueError:
        return f"number {kind}"
