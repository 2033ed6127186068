"""The transfers of pages between the host's memory and files, in threads beside the steps.

The engine says which pages go where (:mod:`trioserve.scheduler.disk_pages`), and uses none of them
for anything else meanwhile.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from gpu.executor import PagedExecutor
from gpu.loading.page_files import PageFiles

_log = logging.getLogger("gpu.worker")


def folder_name(parts: Sequence[object]) -> str:
    """Return the name of the folder for pages whose content depends on ``parts``."""
    return hashlib.blake2b(repr(list(parts)).encode(), digest_size=16).hexdigest()


@attrs.define(eq=False)
class PageTransfers:
    """Transfers between an executor's pages and the files of a folder.

    Args:
        root: Folder that has a folder for each model and number format.
        max_bytes: The most bytes of files in each of these.
        parts: Names of all that the content of pages depends on, besides tokens and weights.
    """

    _executor: PagedExecutor
    _root: Path
    _max_bytes: int
    _parts: Sequence[object]
    _files: PageFiles = attrs.field(init=False)
    """Files of the present weights; a transfer goes on with those that it began with."""
    _idle: threading.Condition = attrs.field(init=False, factory=threading.Condition)
    _num_running: int = attrs.field(init=False, default=0)

    def use(self, weights: str) -> None:
        """Keep pages of the weights with that checksum from now on.

        Raises:
            OSError: The folder can't be made.
        """
        name = folder_name((*self._parts, weights))
        self._files = PageFiles(self._root / name, self._max_bytes)

    def begin(self, arguments: Mapping[str, Any], *, reads: bool) -> None:
        """Note a transfer, in the thread of the steps, before :meth:`write` or :meth:`read`."""
        with self._idle:
            self._num_running += 1
        if reads:
            self._executor.expect_pages(arguments["places"])

    def write(self, arguments: Mapping[str, Any]) -> tuple[list[bool], list[bytes]]:
        """Write pages to files; return for each whether it was, and the keys of deleted ones."""
        files, written = self._files, []
        try:
            for key, place in zip(arguments["keys"], arguments["places"], strict=True):
                written.append(self._write(files, key, place))
            return written, files.shrink()
        finally:
            self._end()

    def _write(self, files: PageFiles, key: bytes, place: int) -> bool:
        try:
            files.write(key, self._executor.read_page(place))
        except OSError as error:
            _log.error("a page can't be written: %s", error)
            return False
        return True

    def read(self, arguments: Mapping[str, Any]) -> int:
        """Read pages from files; return how many, up to the first that isn't there."""
        files, num_read = self._files, 0
        try:
            for key, place in zip(arguments["keys"], arguments["places"], strict=True):
                content = files.read(key)
                if content is None:
                    break
                self._executor.write_page(place, content)
                num_read += 1
            return num_read
        finally:
            self._end()

    def list(self) -> dict[str, str | bytes]:
        """Return the name of the folder, and the keys of all pages, one after the other."""
        return {"folder": self._files.name, "keys": b"".join(self._files.list_keys())}

    def delete_all(self) -> None:
        """Delete all files, once no transfer is under way."""
        self.wait()
        self._files.delete_all()

    def wait(self) -> None:
        """Block until no transfer is under way."""
        with self._idle:
            self._idle.wait_for(lambda: not self._num_running)

    def _end(self) -> None:
        with self._idle:
            self._num_running -= 1
            self._idle.notify_all()
