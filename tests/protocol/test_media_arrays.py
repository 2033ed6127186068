"""Arrays in the argument of a call, or in memory that it names."""

from __future__ import annotations

import os

import msgspec
import numpy as np
import pytest

from trioserve._util.host_memory import host_memory
from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.media_arrays import (
    Array,
    encoded_arrays,
    in_argument,
    read_arrays,
    write_arrays,
)

DIGEST = b"0123456789abcdef"
ARRAYS: dict[str, Array] = {
    "pixels": np.arange(24, dtype=np.float32).reshape(2, 3, 4)[:, ::-1],
    "empty": np.zeros((0, 3), np.int64),
    "grid": np.array([[1, 2, 3]]),
    "one": np.array(7, np.uint8),
}


def same(argument: bytes) -> bool:
    found = read_arrays(msgspec.msgpack.decode(argument))
    return found.keys() == ARRAYS.keys() and all(
        found[name].dtype == each.dtype
        and found[name].shape == each.shape
        and np.array_equal(found[name], each)
        and found[name].flags.writeable
        for name, each in ARRAYS.items()
    )


def test_they_are_the_same_behind_both_ways() -> None:
    assert same(encoded_arrays(ARRAYS))
    with host_memory("test") as path:
        argument = write_arrays(ARRAYS, DIGEST, path)
        assert same(argument)
        moved = in_argument(argument)
    assert same(moved)


@pytest.mark.parametrize("others", [False, True], ids=["closed", "used-again"])
def test_memory_that_is_gone_is_noticed(others: bool) -> None:
    """The path may be that of other memory by then."""
    with host_memory("test") as path:
        argument = write_arrays(ARRAYS, DIGEST, path)
    with host_memory("test") as again:
        assert again == path
        if others:
            write_arrays(ARRAYS, DIGEST[::-1], again)
        with pytest.raises(ModelLoadError, match="isn't there any more"):
            same(argument)


def test_a_pipe_with_the_path_of_memory_is_not_read() -> None:
    with host_memory("test") as path:
        argument = write_arrays(ARRAYS, DIGEST, path)
    read, write = os.pipe()
    try:
        assert path.endswith(f"/{read}")
        with pytest.raises(ModelLoadError, match="isn't there any more"):
            same(argument)
    finally:
        os.close(read)
        os.close(write)


def test_memory_that_is_too_short_is_noticed() -> None:
    with host_memory("test") as path:
        argument = write_arrays(ARRAYS, DIGEST, path)
        with open(path, "r+b") as memory:
            memory.truncate(40)
        with pytest.raises(ModelLoadError, match="isn't there any more"):
            same(argument)
