"""The safetensors files of a folder, and their headers.

A safetensors file has the header's length in eight bytes, the header (JSON with each tensor's
dtype, shape and byte range), and the tensors.
"""

from __future__ import annotations

import itertools
import math
import re
import struct
from pathlib import Path
from typing import Any, TypeGuard

import attrs

from trioserve.model_files.jsonfile import parse_object, read_object
from trioserve.protocol.errors import ModelLoadError

_MAX_HEADER_BYTES = 32 << 20
_MAX_HEADER_VALUES = 1 << 20
"""Most JSON values in a header, approximately: each tensor has eight. The largest models have about
a hundred thousand tensors, in many files.
"""
INDEX_NAME = "model.safetensors.index.json"
_MAX_DIMENSIONS = 8
_FILE_NAME = re.compile(r"[\w-][\w.-]{0,199}", re.ASCII)
_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64"), 8),
}


@attrs.frozen
class Shard:
    """One safetensors file. ``shapes`` and ``dtypes`` (such as ``"BF16"``) are by tensor name.

    No two tensors share a byte, so together they are no larger than the file.
    """

    path: Path
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    offsets: dict[str, int]
    """Start of each tensor's bytes in the file."""
    num_bytes: dict[str, int]


def shard_paths(folder: Path) -> tuple[Path, ...]:
    """Return the safetensors files of a model's folder, sorted by name.

    ``folder`` may also be such a file.

    Raises:
        ModelLoadError: There are no files, or one in the index is missing.
    """
    if folder.is_file():
        return (folder,)
    index = folder / INDEX_NAME
    if index.exists():
        weight_map = read_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelLoadError(f"{index} is damaged: it has no weight_map; fetch it again")
        names = weight_map.values()
        if not all(isinstance(name, str) and _FILE_NAME.fullmatch(name) for name in names):
            raise ModelLoadError(
                f"{index} is damaged: its weight_map holds what is no name of a file in its "
                "folder; fetch it again"
            )
        paths = tuple(folder / name for name in sorted(set(names)))
    else:
        paths = (folder / "model.safetensors",)
        if not paths[0].exists():
            raise ModelLoadError(_no_weights(folder))
    for path in paths:
        if not path.is_file():
            raise ModelLoadError(f"{path} is missing, and {INDEX_NAME} names it: fetch it again")
    return paths


def _no_weights(folder: Path) -> str:
    if any(folder.glob("pytorch_model*.bin")):
        return (
            f"{folder} holds its weights as pytorch_model.bin, which can run code when it is read: "
            "convert it to safetensors"
        )
    return f"{folder} has no model.safetensors: fetch the model's folder again"


def read_shards(folder: Path) -> tuple[Shard, ...]:
    """Return the headers of all safetensors files of a folder, checked against the files' sizes.

    Raises:
        ModelLoadError: A file is missing, damaged or truncated, or two files hold a tensor.
    """
    shards = tuple(read_shard(path) for path in shard_paths(folder))
    seen: dict[str, Path] = {}
    for shard in shards:
        for name in shard.shapes:
            if name in seen:
                raise ModelLoadError(
                    f"{shard.path} and {seen[name].name} both hold {name}: remove the stray file"
                )
            seen[name] = shard.path
    return shards


def read_header_bytes(path: Path) -> bytes:
    """Return the unparsed header of a safetensors file.

    Raises:
        ModelLoadError: The file can't be read, or isn't a safetensors file.
    """
    try:
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= _MAX_HEADER_BYTES:
                raise ModelLoadError(
                    f"{path} is damaged: no safetensors header of up to {_MAX_HEADER_BYTES} bytes; "
                    "fetch it again"
                )
            header = file.read(length)
    except OSError as error:
        raise ModelLoadError(f"{path} can't be read: {error.strerror}") from error
    if len(header) < length:
        raise ModelLoadError(f"{path} is truncated inside its header: fetch it again")
    # Counting first is a thousand times as fast as parsing.
    num_values = header.count(b",") + header.count(b":")
    if num_values > _MAX_HEADER_VALUES:
        raise ModelLoadError(
            f"{path} has a header of about {num_values} values; at most {_MAX_HEADER_VALUES} are "
            "read, enough for 131072 tensors"
        )
    return header


def read_shard(path: Path) -> Shard:
    """Return the header of one safetensors file, checked against the file's size.

    Raises:
        ModelLoadError: The file can't be read, is damaged or truncated.
    """
    header = read_header_bytes(path)
    entries: dict[str, Any] = parse_object(header, path)
    entries.pop("__metadata__", None)
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    ranges: dict[str, tuple[int, int]] = {}
    for name, entry in entries.items():
        parts = _entry(entry)
        if parts is None:
            raise _bad_entry(path)
        dtypes[name], shapes[name], ranges[name] = parts
    in_order = sorted(ranges.values())
    if any(before[1] > after[0] for before, after in itertools.pairwise(in_order)):
        raise _bad_entry(path)
    size = path.stat().st_size
    end = 8 + len(header) + (in_order[-1][1] if in_order else 0)
    if size < end:
        raise ModelLoadError(f"{path} is truncated: {size} bytes of {end}; fetch it again")
    num_bytes = {name: last - first for name, (first, last) in ranges.items()}
    offsets = {name: 8 + len(header) + first for name, (first, _) in ranges.items()}
    return Shard(path, shapes, dtypes, offsets, num_bytes)


def _bad_entry(path: Path) -> ModelLoadError:
    return ModelLoadError(f"{path} is damaged: a bad entry in its header; fetch it again")


def _entry(entry: Any) -> tuple[str, tuple[int, ...], tuple[int, int]] | None:
    """Return dtype, shape and byte range in a header's entry; None if it is inconsistent."""
    if not isinstance(entry, dict):
        return None
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or not _are_sizes(shape) or not _are_sizes(offsets):
        return None
    if len(offsets) != 2 or offsets[0] > offsets[1] or len(shape) > _MAX_DIMENSIONS:
        return None
    # An unknown dtype is refused when its tensor is loaded.
    item = _ITEM_BYTES.get(dtype)
    if item is not None and math.prod(shape) * item != offsets[1] - offsets[0]:
        return None
    return dtype, tuple(shape), (offsets[0], offsets[1])


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        isinstance(size, int) and not isinstance(size, bool) and 0 <= size < 1 << 63
        for size in value
    )
