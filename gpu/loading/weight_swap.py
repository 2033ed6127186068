"""Weight swap: new weights are read while a model is served, and swapped in later."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import attrs

from trioserve.model_files import EncoderFiles, ModelFiles
from trioserve.protocol.errors import ModelLoadError

Files = TypeVar("Files", ModelFiles, EncoderFiles)

ReadWeights = Callable[[ModelFiles], Callable[[], None]]
"""Reads other weights of a served model, in any thread, and returns a function that swaps them in.

Call the latter between two steps, while no slot is open. Reading raises ModelLoadError if the
weights can't be read or don't fit into memory.
"""


def keep_weights(_: ModelFiles) -> Callable[[], None]:
    """Refuse other weights: a :data:`ReadWeights` of several ranks.

    Raises:
        ModelLoadError: Always.
    """
    raise ModelLoadError("the weights of several ranks can't be exchanged: restart the server")


@attrs.define(eq=False)
class ModelWeights(Generic[Files]):
    """The weights that a worker serves, and those read to replace them.

    Call its methods in the thread that runs plans, and the function that :meth:`reading` returns
    in another.
    """

    _files_at: Callable[[Path], Files]
    """Returns the files at a path; raises ModelLoadError if they aren't of this model."""
    _read: Callable[[Files], Callable[[], None]]
    _path: str = attrs.field(init=False, default="")
    _number: int = attrs.field(init=False, default=0)
    """Number of discards so far; the result of a read begun before the last one is dropped."""
    _swap: tuple[Callable[[], None], str] | None = attrs.field(init=False, default=None)

    @property
    def path(self) -> str:
        """Path of the weights being read, or read last and not discarded; empty for none."""
        return self._path

    def reading(self, path: str) -> Callable[[], str]:
        """Return a function that reads the weights at ``path`` and keeps them for a swap.

        It returns their :meth:`~trioserve.model_files.ModelFiles.checksum`. It raises
        ModelLoadError if they can't be read, are of another model, or don't fit into memory.
        Weights read earlier and not swapped in are dropped at once.
        """
        self.discard()
        self._path, number = path, self._number

        def read() -> str:
            files = self._files_at(Path(path))
            swap, checksum = self._read(files), files.checksum()
            if number == self._number:
                self._swap = swap, checksum
            return checksum

        return read

    def swap(self, path: str) -> str:
        """Serve the weights read at ``path`` from the next step on, and return their checksum.

        Raises:
            ModelLoadError: other weights were read last, or none.
        """
        if self._swap is None or self._path != path:
            raise ModelLoadError(f"the weights at {path} haven't been read")
        swap, checksum = self._swap
        swap()
        self.discard()
        return checksum

    def discard(self) -> None:
        """Drop weights read but not swapped in, and the result of a read in progress."""
        self._number += 1
        self._swap, self._path = None, ""
