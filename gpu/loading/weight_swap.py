"""Weight swap: new weights are read while a model serves, and put in place later."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import attrs

from trioserve.model_files import EncoderFiles, ModelFiles
from trioserve.protocol.errors import ModelLoadError

Files = TypeVar("Files", ModelFiles, EncoderFiles)

ReadWeights = Callable[[ModelFiles], Callable[[], None]]
"""Reads other weights of a model while it serves, in any thread.

It raises ModelLoadError if they can't be read or there is no room for them. It returns a function
that swaps them in; call that between two steps, while no slot is open.
"""


@attrs.define(eq=False)
class ModelWeights(Generic[Files]):
    """The weights that a worker serves, and those that will replace them.

    Its methods are for the thread that serves plans; the function that :meth:`reading` returns is
    for another thread.
    """

    _files_at: Callable[[Path], Files]
    """Returns the files at a path; raises ModelLoadError if they aren't of this model."""
    _read: Callable[[Files], Callable[[], None]]
    _path: str = attrs.field(init=False, default="")
    """Path of the weights that are being read, or have been."""
    _number: int = attrs.field(init=False, default=0)
    """Count of discards; a read that began under a lower number is dropped."""
    _swap: Callable[[], None] | None = attrs.field(init=False, default=None)

    def reading(self, path: str) -> Callable[[], str]:
        """Return a function that reads the weights at ``path`` and keeps them for a swap.

        The function returns their :meth:`~trioserve.model_files.ModelFiles.checksum`. It raises
        ModelLoadError if they can't be read, aren't of this model, or there is no room for them.
        Weights that were read before and aren't in use are dropped at once.
        """
        self.discard()
        self._path, number = path, self._number

        def read() -> str:
            files = self._files_at(Path(path))
            swap = self._read(files)
            if number == self._number:
                self._swap = swap
            return files.checksum()

        return read

    def swap(self, path: str) -> None:
        """Serve the weights read at ``path`` from the next step on.

        Raises:
            ModelLoadError: something else was read last, or nothing.
        """
        if self._swap is None or self._path != path:
            raise ModelLoadError(f"the weights at {path} haven't been read")
        self._swap()
        self.discard()

    def discard(self) -> None:
        """Drop the weights that were read but aren't served, and the result of a read under way."""
        self._number += 1
        self._swap, self._path = None, ""
