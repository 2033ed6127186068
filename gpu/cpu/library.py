"""The compiled kernels of the CPU, as functions to be called through ctypes."""

from __future__ import annotations

import ctypes
import shutil

from gpu.cpu.build import LibraryBuildError, OnProgress, build, is_temporary

Library = ctypes.CDLL
"""Functions by name; a caller declares its argument and result types first."""

_loaded: Library | None = None


def load_library(on_progress: OnProgress | None = None) -> Library:
    """Return the library, built if need be; the same one for the whole process.

    ``on_progress`` is called while it is compiled, if it is.

    Raises:
        BuildError: there is none for this machine; one line says why.
    """
    global _loaded
    if _loaded is None:
        path = build(on_progress)
        try:
            _loaded = Library(str(path))
        except OSError as error:
            raise LibraryBuildError(f"the compiled kernels can't be loaded: {error}") from error
        finally:
            if is_temporary(path):
                shutil.rmtree(path.parent, ignore_errors=True)
    return _loaded


def no_room_for(threads: int) -> str:
    """Return the line for a function of the library that could make nothing to compute with."""
    return (
        f"no memory is left, or no room for {threads} threads: free some memory, or lower "
        "--num-threads"
    )
