"""The safetensors files of a folder: which they are, and what their headers promise.

A safetensors file is eight bytes with the header's length, the header (JSON: for each tensor its
dtype, shape and byte range), and the tensors.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import attrs

from trioserve.errors import ModelLoadError
from trioserve.model_files.jsonfile import parse_object, read_object

__all__ = ["Shard", "read_shards", "shard_paths"]

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
INDEX_NAME = "model.safetensors.index.json"


@attrs.frozen
class Shard:
    """One safetensors file. ``shapes`` and ``dtypes`` (such as ``"BF16"``) are by tensor name."""

    path: Path
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    num_bytes: dict[str, int]


def shard_paths(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a model's folder, in the order of their names.

    Raises:
        ModelLoadError: there are none, or the index names one that is missing.
    """
    index = folder / INDEX_NAME
    if index.exists():
        weight_map = read_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelLoadError(f"{index} is damaged: it has no weight_map; fetch it again")
        paths = tuple(folder / name for name in sorted({str(name) for name in weight_map.values()}))
    else:
        paths = (folder / "model.safetensors",)
        if not paths[0].exists():
            raise ModelLoadError(_no_weights(folder))
    for path in paths:
        if not path.exists():
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
    """The headers of all safetensors files of a folder, checked against the files' sizes.

    Raises:
        ModelLoadError: a file is missing, damaged or truncated, or holds a tensor twice.
    """
    shards = tuple(_read_shard(path) for path in shard_paths(folder))
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
    """The header of a safetensors file, as it stands.

    Raises:
        ModelLoadError: the file can't be read, or is no safetensors file.
    """
    try:
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= _MAX_HEADER_BYTES:
                raise ModelLoadError(f"{path} is damaged: no safetensors header; fetch it again")
            header = file.read(length)
    except OSError as error:
        raise ModelLoadError(f"{path} can't be read: {error.strerror}") from error
    if len(header) < length:
        raise ModelLoadError(f"{path} is truncated inside its header: fetch it again")
    return header


def _read_shard(path: Path) -> Shard:
    header = read_header_bytes(path)
    entries: dict[str, Any] = parse_object(header, path)
    entries.pop("__metadata__", None)
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    sizes: dict[str, int] = {}
    end = 0
    try:
        for name, entry in entries.items():
            first, last = entry["data_offsets"]
            shapes[name] = tuple(int(size) for size in entry["shape"])
            dtypes[name] = str(entry["dtype"])
            sizes[name] = int(last) - int(first)
            end = max(end, int(last))
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(
            f"{path} is damaged: a bad entry in its header; fetch it again"
        ) from error
    size = path.stat().st_size
    if size < 8 + len(header) + end:
        raise ModelLoadError(
            f"{path} is truncated: {size} bytes of {8 + len(header) + end}; fetch it again"
        )
    return Shard(path, shapes, dtypes, sizes)
