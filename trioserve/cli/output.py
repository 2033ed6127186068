"""Output of a command to stdout, and errors in writing it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from trioserve.protocol.errors import TrioserveError


class OutputError(TrioserveError):
    """The output can't be written, as on a full disk."""


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Turn an error in writing to stdout into an ``OutputError``.

    Raises:
        OutputError: stdout can't be written.
        BrokenPipeError: The pipe's reader is gone, which isn't a failure of the command.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"the output can't be written: {error.strerror or error}") from error


def discard_output() -> None:
    """Redirect stdout to /dev/null, so that Python's last flush doesn't repeat the error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
