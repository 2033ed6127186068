"""Errors of Rust libraries, turned into ordinary exceptions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from trioserve.protocol.errors import ModelLoadError


class Panic(Exception):
    """A panic of a Rust library, such as ``tokenizers`` or ``llguidance``."""


@contextlib.contextmanager
def panics_raised() -> Iterator[None]:
    """Turn a panic in the block, which is a BaseException, into an ordinary exception.

    Raises:
        Panic: The library panicked.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise Panic(str(error)) from None


@contextlib.contextmanager
def refused_by_tokenizers(path: Path) -> Iterator[None]:
    """Turn any error of the library while it loads ``path`` into a one-line ModelLoadError.

    The library raises plain Exceptions, and its panics are BaseExceptions.

    Raises:
        ModelLoadError: The library raised an error.
    """
    try:
        with panics_raised():
            yield
    except ModelLoadError:
        raise
    except Exception as error:
        lines = str(error).splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise ModelLoadError(f"{path} is damaged: {reason}; fetch it again") from error
