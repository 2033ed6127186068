"""What the ``tokenizers`` library raises for a model's files, as errors that one can act on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from trioserve.errors import ModelLoadError

__all__ = ["refused_by_tokenizers"]


@contextlib.contextmanager
def refused_by_tokenizers(path: Path) -> Iterator[None]:
    """Turn whatever the library raises, while it makes a tokenizer of ``path``, into one line.

    It raises bare Exceptions, and a panic of its Rust code is a BaseException of its own.

    Raises:
        ModelLoadError: it did raise something.
    """
    try:
        yield
    except ModelLoadError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        lines = str(error).splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise ModelLoadError(f"{path} is damaged: {reason}; fetch it again") from error
