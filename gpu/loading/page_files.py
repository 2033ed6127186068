"""Pages of the KV cache in files, one for each page, found by their keys.

The engine makes the keys (:mod:`trioserve.scheduler.disk_pages`): a key stands for all tokens up to
the page's end. All else that the content depends on is in the name of the folder, so workers of the
same model and number format share it, at the same time, too. A file begins with its key and a
checksum of its content. One that was damaged, or is another page's, is noticed and deleted.

A file appears complete: it is written under another name first. It isn't flushed to the disk, so a
machine that loses power may leave a damaged one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import struct
import threading
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

_MAGIC = b"trioKV02"
_HEAD = struct.Struct("<8s16sIQ")
"""Magic bytes, key, checksum and length of the content."""
_SUFFIX = ".page"
_NAME = re.compile(f"[0-9a-f]{{32}}{re.escape(_SUFFIX)}")
_ROOM = 0.05
"""Part of the allowed bytes that is freed at once, so that not every page lists the folder."""

_log = logging.getLogger("gpu.worker")


class PageFiles:
    """The files of one folder, at most ``max_bytes`` together. Threads may use it side by side.

    Raises:
        OSError: The folder can't be made or read.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._total = sum(size for _, size, _ in self._list())

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self._folder.name

    def list_keys(self) -> list[bytes]:
        """Return the keys of all pages, the one first that was used longest ago."""
        return [bytes.fromhex(path.stem) for _, _, path in self._list()]

    def write(self, key: bytes, content: npt.NDArray[np.uint8]) -> None:
        """Write a page, [B]; one of the same key is replaced.

        Raises:
            OSError: The disk is full, or can't be written.
        """
        head = _HEAD.pack(_MAGIC, key, checksum_of(content), len(content))
        path = self._path(key)
        part = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        try:
            with part.open("wb") as file:
                file.write(head)
                file.write(content.data)
            part.replace(path)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        with self._lock:
            self._total += _HEAD.size + len(content)

    def read(self, key: bytes) -> npt.NDArray[np.uint8] | None:
        """Return a page; None if it isn't there, or its file is damaged."""
        path = self._path(key)
        try:
            data = np.fromfile(path, dtype=np.uint8)
        except OSError:
            return None
        head, content = data[: _HEAD.size].tobytes(), data[_HEAD.size :]
        if head != _HEAD.pack(_MAGIC, key, checksum_of(content), len(content)):
            _log.error("a page's file is damaged and is deleted: %s", path)
            path.unlink(missing_ok=True)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # It was used now.
        return content

    def shrink(self) -> list[bytes]:
        """Delete the pages used longest ago if all take too much room; return their keys."""
        with self._lock:
            if self._total <= self._max_bytes:
                return []
            files = self._list()  # Others may have written or deleted some.
            self._total = sum(size for _, size, _ in files)
            deleted = []
            for _, size, path in files:
                if self._total <= self._max_bytes * (1 - _ROOM):
                    break
                path.unlink(missing_ok=True)
                self._total -= size
                deleted.append(bytes.fromhex(path.stem))
            return deleted

    def delete_all(self) -> None:
        """Delete all pages."""
        with self._lock:
            for _, _, path in self._list():
                path.unlink(missing_ok=True)
            self._total = 0

    def _path(self, key: bytes) -> Path:
        return self._folder / f"{key.hex()}{_SUFFIX}"

    def _list(self) -> list[tuple[int, int, Path]]:
        """Return time of last use, size and path of each file, the oldest first."""
        found = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if _NAME.fullmatch(entry.name):
                    with contextlib.suppress(OSError):  # another process has deleted it
                        status = entry.stat()
                        found.append((status.st_mtime_ns, status.st_size, Path(entry.path)))
        return sorted(found)


def checksum_of(content: npt.NDArray[np.uint8]) -> int:
    """Return the CRC-32 of a page. Damage is to be noticed, and a cryptographic hash takes longer
    than many models take to compute the page.
    """
    return zlib.crc32(content.data)
