"""Pages in files: found by their keys, checked, bounded, and shared by several workers."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

import gpu.worker
from gpu.executor import PagedExecutor
from gpu.loading.page_files import PageFiles
from gpu.loading.page_transfers import PageTransfers
from gpu.worker import Worker

Content = npt.NDArray[np.uint8]
HEAD = 36
SIZE = 100


def key(number: int) -> bytes:
    return bytes([number] * 16)


def page(number: int) -> Content:
    return np.random.default_rng(number).integers(0, 256, SIZE, dtype=np.uint8)


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.page"))


def make_old(folder: Path, number: int, age: float) -> None:
    (path,) = folder.rglob(f"{key(number).hex()}.page")
    changed = path.stat().st_mtime - age
    os.utime(path, (changed, changed))


def test_a_page_is_read_as_it_was_written(tmp_path: Path) -> None:
    files = PageFiles(tmp_path / "new" / "folder", 1 << 20)
    assert files.list_keys() == []
    files.write(key(1), page(1))
    files.write(key(2), page(2))
    make_old(tmp_path, 2, 10)
    assert np.array_equal(cast(Content, files.read(key(1))), page(1))
    assert files.read(key(3)) is None
    assert PageFiles(tmp_path / "new" / "folder", 1).list_keys() == [key(2), key(1)]
    assert (tmp_path / "new" / "folder").stat().st_mode & 0o777 == 0o700
    files.delete_all()
    assert files.list_keys() == [] == files_in(tmp_path)


def flip(data: bytearray) -> None:
    data[HEAD + 7] ^= 1


def shorten(data: bytearray) -> None:
    del data[-1]


def lengthen(data: bytearray) -> None:
    data.append(0)


def rename(data: bytearray) -> None:
    data[8:24] = key(9)


def empty(data: bytearray) -> None:
    data.clear()


@pytest.mark.parametrize("damage", [flip, shorten, lengthen, rename, empty])
def test_a_damaged_file_is_noticed_and_deleted(tmp_path: Path, damage: Any) -> None:
    files = PageFiles(tmp_path, 1 << 20)
    files.write(key(1), page(1))
    (path,) = files_in(tmp_path)
    data = bytearray(path.read_bytes())
    damage(data)
    path.write_bytes(data)
    assert files.read(key(1)) is None
    assert files_in(tmp_path) == []


def test_a_page_under_the_name_of_another_is_noticed(tmp_path: Path) -> None:
    files = PageFiles(tmp_path, 1 << 20)
    files.write(key(1), page(1))
    (path,) = files_in(tmp_path)
    path.rename(path.with_stem(key(2).hex()))
    assert files.read(key(2)) is None


def test_pages_used_longest_ago_make_room(tmp_path: Path) -> None:
    files = PageFiles(tmp_path, 10 * (SIZE + HEAD))
    for number in range(10):
        files.write(key(number), page(number))
        make_old(tmp_path, number, 100 - number)
        assert files.shrink() == []
    files.read(key(0))
    files.write(key(10), page(10))
    assert files.shrink() == [key(1), key(2)]  # and a twentieth more than needed
    assert len(files.list_keys()) == 9
    assert key(0) in files.list_keys()


def test_files_of_others_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "notes.page"
    other.write_text("keep me")
    files = PageFiles(tmp_path, 1)
    files.write(key(1), page(1))
    assert files.shrink() == [key(1)]
    files.delete_all()
    assert other.read_text() == "keep me"


def test_a_page_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = PageFiles(tmp_path, 1 << 20)

    def refuse(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="No space left"):
        files.write(key(1), page(1))
    assert list(tmp_path.iterdir()) == []


class Pages:
    """Pages of an executor, by their numbers."""

    def __init__(self) -> None:
        self.contents: dict[int, Content] = {}
        self.expected: list[int] = []

    def begin_transfer(self, written: Sequence[int]) -> None:
        self.expected += written

    def read_page(self, number: int) -> Content:
        return self.contents[number]

    def write_page(self, number: int, content: Content) -> None:
        assert number in self.expected
        self.contents[number] = content


def transfers_in(folder: Path, pages: Pages, weights: str = "weights") -> PageTransfers:
    executor = cast(PagedExecutor, pages)
    transfers = PageTransfers(executor=executor, root=folder, max_bytes=1 << 20, parts=("bf16",))
    transfers.use(weights)
    return transfers


def write(transfers: PageTransfers, numbers: Sequence[int]) -> tuple[list[bool], list[bytes]]:
    arguments = {"keys": [key(number) for number in numbers], "places": list(numbers)}
    transfers.begin("write_pages", arguments)
    return transfers.write(arguments)


def read(transfers: PageTransfers, numbers: Sequence[int]) -> int:
    arguments = {"keys": [key(number) for number in numbers], "places": list(numbers)}
    transfers.begin("read_pages", arguments)
    return transfers.read(arguments)


def test_pages_are_read_up_to_the_first_that_is_not_there(tmp_path: Path) -> None:
    pages = Pages()
    pages.contents = {number: page(number) for number in (1, 2, 4)}
    assert write(transfers_in(tmp_path, pages), [1, 2, 4]) == ([True] * 3, [])
    other = Pages()
    transfers = transfers_in(tmp_path, other)
    listed = transfers.list()
    keys = listed["keys"]
    assert isinstance(keys, bytes)
    assert {keys[at : at + 16] for at in (0, 16, 32)} == {key(1), key(2), key(4)}
    assert read(transfers, [1, 2, 3, 4]) == 2
    assert other.contents.keys() == {1, 2}
    assert all(np.array_equal(other.contents[number], page(number)) for number in (1, 2))
    transfers.wait()


def test_pages_of_other_weights_are_apart(tmp_path: Path) -> None:
    pages = Pages()
    pages.contents = {1: page(1)}
    transfers = transfers_in(tmp_path, pages)
    write(transfers, [1])
    transfers.use("other weights")
    assert read(transfers, [1]) == 0
    transfers.use("weights")
    assert read(transfers, [1]) == 1
    transfers.delete_all()
    assert transfers.list()["keys"] == b""


def test_weights_are_exchanged_behind_the_transfers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that is being written is one of the old weights."""
    monkeypatch.setattr(gpu.worker, "freeze_objects", lambda: None)
    pages = Pages()
    pages.contents = {1: page(1)}
    transfers = transfers_in(tmp_path, pages)

    class Weights:
        def swap(self, path: str) -> str:
            pages.contents[1] = page(2)  # of the new cache
            return path

    worker, nothing = Worker(cast(Any, None)), cast(Any, SimpleNamespace(slots=[]))
    worker._transfers, worker._weights = transfers, cast(Any, Weights())
    arguments = {"keys": [key(1)], "places": [1]}
    transfers.begin("write_pages", arguments)
    writing = threading.Timer(0.05, transfers.write, (arguments,))
    writing.start()
    worker._swap_weights(nothing, "others")
    writing.join(60)
    assert read(transfers, [1]) == 0
    transfers.use("weights")
    assert read(transfers, [1]) == 1
    assert np.array_equal(pages.contents[1], page(1))


def test_a_full_disk_is_told_page_by_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = Pages()
    pages.contents = {number: page(number) for number in (1, 2)}
    transfers = transfers_in(tmp_path, pages)
    usual = PageFiles.write

    def refuse_one(self: PageFiles, name: bytes, content: Content) -> None:
        if name == key(1):
            raise OSError(28, "No space left on device")
        usual(self, name, content)

    monkeypatch.setattr(PageFiles, "write", refuse_one)
    assert write(transfers, [1, 2]) == ([False, True], [])
