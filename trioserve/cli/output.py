"""What a command prints, and what becomes of it where it can't be printed."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from trioserve.protocol.errors import TrioserveError

__all__ = ["OutputError", "discard_output", "writing"]


class OutputError(TrioserveError):
    """What a command has to say can't be written, as on a full disk."""


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Around writing to stdout.

    Raises:
        OutputError: it can't be written to.
        BrokenPipeError: nobody reads it any more, which is no failure of the command's.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"the output can't be written: {error.strerror or error}") from error


def discard_output() -> None:
    """Keep Python from reporting the same once more when it flushes stdout on its way out."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
