"""Pages on their way to another worker: read as they were written, or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from gpu.executor import PagedExecutor
from gpu.loading.page_transfers import PageTransfers
from tests.gpu.loading.test_page_files import Pages, key, page
from trioserve._util.host_memory import host_memory
from trioserve.protocol.errors import ModelLoadError


@pytest.fixture
def memory() -> Iterator[str]:
    with host_memory("pages") as path:
        yield path


def transfers_of(pages: Pages, weights: str = "weights") -> PageTransfers:
    transfers = PageTransfers(executor=cast(PagedExecutor, pages), parts=("bf16",))
    transfers.use(weights)
    return transfers


def export(memory: str, numbers: Sequence[int]) -> None:
    pages = Pages()
    pages.contents = {number: page(number) for number in numbers}
    transfers = transfers_of(pages)
    arguments: dict[str, Any] = {
        "memory": memory,
        "keys": [key(number) for number in numbers],
        "pages": list(numbers),
    }
    transfers.begin("export_pages", arguments)
    transfers.export_pages(arguments)
    transfers.wait()


def take(memory: str, numbers: Sequence[int], weights: str = "weights") -> tuple[int, Pages]:
    pages = Pages()
    transfers = transfers_of(pages, weights)
    arguments: dict[str, Any] = {
        "memory": memory,
        "keys": [key(number) for number in numbers],
        "places": [10 + number for number in numbers],
    }
    transfers.begin("import_pages", arguments)
    count = transfers.import_pages(arguments)
    transfers.wait()
    return count, pages


def test_pages_arrive_in_the_places_that_are_named(memory: str) -> None:
    export(memory, [3, 1, 2])
    count, pages = take(memory, [3, 1, 2, 4])
    assert count == 3
    assert pages.contents.keys() == {13, 11, 12}
    assert all(np.array_equal(pages.contents[10 + each], page(each)) for each in (1, 2, 3))


def test_pages_go_in_a_message_too() -> None:
    pages = Pages()
    pages.contents = {1: page(1), 2: page(2)}
    transfers = transfers_of(pages)
    exported: dict[str, Any] = {"keys": [key(1), key(2)], "pages": [1, 2]}
    transfers.begin("export_pages", exported)
    content = transfers.export_pages(exported)
    other = Pages()
    transfers = transfers_of(other)
    arguments: dict[str, Any] = {"keys": [key(1), key(2)], "places": [8, 9], "content": content}
    transfers.begin("import_pages", arguments)
    assert transfers.import_pages(arguments) == 2
    assert np.array_equal(other.contents[8], page(1))
    assert np.array_equal(other.contents[9], page(2))
    transfers.wait()


def test_pages_of_another_key_end_the_transfer(memory: str) -> None:
    export(memory, [1, 2, 3])
    count, pages = take(memory, [1, 5, 3])
    assert count == 1
    assert pages.contents.keys() == {11}


def test_pages_of_other_weights_are_not_taken(memory: str) -> None:
    export(memory, [1])
    assert take(memory, [1], "others")[0] == 0


def damage(data: bytearray) -> None:
    data[-1] ^= 1


def shorten(data: bytearray) -> None:
    del data[-1]


def empty(data: bytearray) -> None:
    data.clear()


@pytest.mark.parametrize("change", [damage, shorten, empty])
def test_a_damaged_page_is_not_taken(
    memory: str, tmp_path: Path, change: Callable[[bytearray], None]
) -> None:
    export(memory, [1])
    data = bytearray(Path(memory).read_bytes())
    change(data)
    changed = tmp_path / "changed"
    changed.write_bytes(data)
    assert take(str(changed), [1])[0] == 0


def test_a_length_beyond_the_memory_is_noticed(memory: str, tmp_path: Path) -> None:
    export(memory, [1])
    data = bytearray(Path(memory).read_bytes())
    data[48:56] = (1 << 62).to_bytes(8, "little")
    changed = tmp_path / "changed"
    changed.write_bytes(data)
    assert take(str(changed), [1])[0] == 0


def test_memory_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with host_memory("pages") as path:
        pass
    for function in (export, take):
        with pytest.raises(OSError, match="No such file"):
            function(path, [1])


def test_nothing_is_left_of_the_memory() -> None:
    before = os.listdir("/proc/self/fd")
    with host_memory("pages") as path:
        export(path, [1])
    assert os.listdir("/proc/self/fd") == before


def test_without_a_folder_there_are_no_files() -> None:
    transfers = transfers_of(Pages())
    with pytest.raises(ModelLoadError, match="no pages in files"):
        transfers.list()
