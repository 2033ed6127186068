"""The transfers of pages to files or to other workers, and back, in threads beside the steps.

The engine says which pages go where (:mod:`trioserve.scheduler.disk_pages`), and uses none of them
for anything else meanwhile.
"""

from __future__ import annotations

import hashlib
import io
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from gpu.executor import PagedExecutor
from gpu.loading.page_files import PageFiles
from gpu.loading.page_memory import read_pages, write_pages
from trioserve.protocol.errors import ModelLoadError

_log = logging.getLogger("gpu.worker")


def folder_name(parts: Sequence[object]) -> str:
    """Return the name of the folder for pages whose content depends on ``parts``."""
    return _digest(parts).hex()


def _digest(parts: Sequence[object]) -> bytes:
    return hashlib.blake2b(repr(list(parts)).encode(), digest_size=16).digest()


@attrs.define(eq=False)
class PageTransfers:
    """Transfers between an executor's pages and files, or memory shared with another worker.

    Args:
        parts: Names of all that the content of pages depends on, besides tokens and weights.
        root: Folder that has a folder for each model and number format; None for no files.
        max_bytes: The most bytes of files in each of these.
    """

    _executor: PagedExecutor
    _parts: Sequence[object]
    _root: Path | None = None
    _max_bytes: int = 0
    _state: bytes = attrs.field(init=False)
    """Digest of all that the content of pages depends on, besides tokens."""
    _files: PageFiles | None = attrs.field(init=False, default=None)
    """Files of the present weights; a transfer goes on with those that it began with."""
    _idle: threading.Condition = attrs.field(init=False, factory=threading.Condition)
    _num_running: int = attrs.field(init=False, default=0)

    def use(self, weights: str) -> None:
        """Transfer pages of the weights with that checksum from now on.

        Raises:
            OSError: The folder can't be made.
        """
        self._state = _digest((*self._parts, weights))
        if self._root is not None:
            self._files = PageFiles(self._root / self._state.hex(), self._max_bytes)

    @property
    def calls(self) -> dict[str, Callable[[Mapping[str, Any]], Any]]:
        """The calls that threads answer, by name; :meth:`begin` comes before each."""
        return {
            "write_pages": self.write,
            "read_pages": self.read,
            "export_pages": self.export_pages,
            "import_pages": self.import_pages,
        }

    def begin(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Note the transfer of the call ``name``, in the thread of the steps."""
        with self._idle:
            self._num_running += 1
        writes = name in ("read_pages", "import_pages")
        self._executor.begin_transfer(arguments["places"] if writes else ())

    def export_pages(self, arguments: Mapping[str, Any]) -> bytes:
        """Write pages for another worker: to the memory that is named, or to the result.

        Raises:
            OSError: There is no memory for them.
        """
        state = self._state
        try:
            contents = map(self._executor.read_page, arguments["pages"])
            if "memory" in arguments:
                with Path(arguments["memory"]).open("r+b") as memory:
                    write_pages(memory, state, arguments["keys"], contents)
                return b""
            message = io.BytesIO()
            write_pages(message, state, arguments["keys"], contents)
            return message.getvalue()
        finally:
            self._end()

    def import_pages(self, arguments: Mapping[str, Any]) -> int:
        """Read pages that another worker has exported; return how many were there.

        Raises:
            OSError: The memory isn't there.
        """
        num_read = 0
        try:
            with self._opened(arguments) as memory:
                contents = read_pages(memory, self._state, arguments["keys"])
                for place, content in zip(arguments["places"], contents, strict=False):
                    self._executor.write_page(place, content)
                    num_read += 1
            return num_read
        finally:
            self._end()

    def _opened(self, arguments: Mapping[str, Any]) -> io.BufferedIOBase:
        if "memory" in arguments:
            return Path(arguments["memory"]).open("rb")
        return io.BytesIO(arguments["content"])

    def write(self, arguments: Mapping[str, Any]) -> tuple[list[bool], list[bytes]]:
        """Write pages to files; return for each whether it was, and the keys of deleted ones."""
        files, written = self._existing_files, []
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
        files, num_read = self._existing_files, 0
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
        files = self._existing_files
        return {"folder": files.name, "keys": b"".join(files.list_keys())}

    def delete_all(self) -> None:
        """Delete all files, once no transfer is under way."""
        self.wait()
        self._existing_files.delete_all()

    def wait(self) -> None:
        """Block until no transfer is under way."""
        with self._idle:
            self._idle.wait_for(lambda: not self._num_running)

    @property
    def _existing_files(self) -> PageFiles:
        if self._files is None:
            raise ModelLoadError("this worker keeps no pages in files")
        return self._files

    def _end(self) -> None:
        with self._idle:
            self._num_running -= 1
            self._idle.notify_all()
