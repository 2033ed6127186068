"""Exchanging a model's weights while it serves: they are read first, and put in place later."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import attrs

from trioserve.model_files import EncoderFiles, ModelFiles
from trioserve.protocol.errors import ModelLoadError

Files = TypeVar("Files", ModelFiles, EncoderFiles)

ReadWeights = Callable[[ModelFiles], Callable[[], None]]
"""Reads other weights of a model that goes on serving meanwhile, in whatever thread.

It raises ModelLoadError where they can't be read or there is no room for them. What it returns puts
them in place of those that serve; that is to be called between two steps, while no slot is open.
"""


@attrs.define(eq=False)
class ModelWeights(Generic[Files]):
    """The weights that a worker serves, and those that are to take their place.

    Its methods are for the thread that serves plans; what :meth:`reading` gives is for another.
    """

    _files_at: Callable[[Path], Files]
    """Returns what is at a path, and raises ModelLoadError where that isn't of this model."""
    _read: Callable[[Files], Callable[[], None]]
    _path: str = attrs.field(init=False, default="")
    """What is being read, or has been."""
    _number: int = attrs.field(init=False, default=0)
    """Grows whenever what is being read isn't wanted any more."""
    _swap: Callable[[], None] | None = attrs.field(init=False, default=None)

    def reading(self, path: str) -> Callable[[], str]:
        """What reads the weights at ``path``, and keeps them beside those that serve.

        It returns their :meth:`~trioserve.model_files.ModelFiles.checksum`, and raises
        ModelLoadError where they can't be read, aren't of this model, or there is no room for them.
        What was read before and is not in use is dropped at once.
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
        """Serve what was read at ``path`` from the next step on.

        Raises:
            ModelLoadError: something else was read last, or nothing.
        """
        if self._swap is None or self._path != path:
            raise ModelLoadError(f"the weights at {path} haven't been read")
        self._swap()
        self.discard()

    def discard(self) -> None:
        """Keep nothing but what serves; what is being read is dropped when it is there."""
        self._number += 1
        self._swap, self._path = None, ""
