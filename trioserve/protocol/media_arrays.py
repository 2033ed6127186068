"""The arrays of processed media on their way to a worker.

They are in the argument of its call, or in memory of the host that the argument names. There they
stand behind the digest of their content.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from trioserve.protocol.errors import ModelLoadError

Array = npt.NDArray[Any]


def encoded_arrays(arrays: Mapping[str, Array]) -> bytes:
    """Return the argument with ``arrays`` in it: names, dtypes, shapes and bytes."""
    rows = [
        (name, each.dtype.str, each.shape, _bytes_of(each).data) for name, each in arrays.items()
    ]
    return msgspec.msgpack.encode({"arrays": rows})


def write_arrays(arrays: Mapping[str, Array], digest: bytes, path: str) -> bytes:
    """Write ``arrays`` to the memory at ``path``; return the argument that names it.

    Raises:
        OSError: There is no room for them.
    """
    with Path(path).open("r+b") as memory:
        memory.write(digest)
        for each in arrays.values():
            memory.write(_bytes_of(each).data)
    rows = [(name, each.dtype.str, each.shape, b"") for name, each in arrays.items()]
    return msgspec.msgpack.encode({"arrays": rows, "memory": path, "digest": digest})


def read_arrays(argument: Mapping[str, Any]) -> dict[str, Array]:
    """Return the arrays of a decoded argument; they may be written to.

    Raises:
        ModelLoadError: The memory isn't there any more.
    """
    if "memory" not in argument:
        return {
            name: np.frombuffer(bytearray(content), dtype=np.dtype(dtype)).reshape(shape)
            for name, dtype, shape, content in argument["arrays"]
        }
    try:
        with _opened(argument["memory"]) as memory:
            is_there = memory.read(len(argument["digest"])) == argument["digest"]
            arrays = {
                name: np.empty(shape, np.dtype(dtype))
                for name, dtype, shape, _ in argument["arrays"]
            }
            for each in arrays.values():
                content = _bytes_of(each)
                is_there = is_there and memory.readinto(content.data) == len(content)
    except OSError:
        is_there = False
    if not is_there:
        raise ModelLoadError("the memory with the arrays isn't there any more")
    return arrays


def _opened(path: str) -> BufferedReader:
    """Open memory for reading.

    Raises:
        OSError: There is none. A pipe that has the path now is none either, and isn't read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no file")
    return open(descriptor, "rb")


def in_argument(argument: bytes) -> bytes:
    """Return the argument with the arrays in it, for a worker of another host.

    Raises:
        ModelLoadError: The memory isn't there any more.
    """
    return encoded_arrays(read_arrays(msgspec.msgpack.decode(argument)))


def _bytes_of(array: Array) -> npt.NDArray[np.uint8]:
    """Return a view [number of bytes] of a contiguous array, otherwise a copy."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
