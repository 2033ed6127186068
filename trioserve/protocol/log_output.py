"""Where the lines of a log go, the server's and its worker's alike: stderr, which may be stuck.

Of the standard library only, because the worker shares it.
"""

from __future__ import annotations

import logging
import select
import sys
from typing import TextIO

WORKER_LOG = "_TRIOSERVE_WORKER_LOG"
"""The environment variable that tells a worker how to log: the format, a colon, the level."""

PATIENCE = 0.05
"""Seconds that a line waits for whoever reads stderr. The server waits, too, and the worker."""
PIECE = 1000
"""Characters that a pipe takes at once if it takes any: at most 4 bytes each, of 4096."""


def escaped(text: str, keep: str = "") -> str:
    """Return ``text`` with an escape for each character that can't be printed.

    Such a character could move the cursor of a terminal, hide what comes before it or turn its
    order around: control and format characters, line ends, surrogates, unassigned ones.

    Args:
        text: From a client, a model, a file or another server.
        keep: Characters to leave as they are.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in keep else ascii(character)[1:-1]
        for character in text
    )


class StderrHandler(logging.Handler):
    """Writes to whatever ``sys.stderr`` is at the time: a progress bar puts itself in between.

    Where nobody reads a pipe or a terminal was stopped, a write would wait for ever, and with it
    every request. So a line that isn't taken soon is dropped, and so is one that can't be written:
    the disk is full, the reader has left. The next line that is taken tells how many were lost.
    """

    def __init__(self) -> None:
        super().__init__()
        self._num_dropped = 0
        self._is_torn = False
        """Whether only the beginning of the last line that was taken is there."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, or drop it."""
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        if self._num_dropped:
            line = f"{self.format(_loss(self._num_dropped))}\n{line}"
        try:
            is_taken = self._write(("\n" if self._is_torn else "") + line + "\n")
        except (OSError, ValueError, AttributeError):  # ValueError: closed; AttributeError: None
            is_taken = False
        self._num_dropped = 0 if is_taken else self._num_dropped + 1

    def _write(self, text: str) -> bool:
        """Write ``text`` and say whether all of it was taken."""
        stream = sys.stderr
        for start in range(0, len(text), PIECE):
            if not _takes(stream, 0.0 if self._num_dropped else PATIENCE):
                self._is_torn = self._is_torn or start > 0
                return False
            stream.write(text[start : start + PIECE])
            stream.flush()
        self._is_torn = False
        return True


def _takes(stream: TextIO, seconds: float) -> bool:
    """Whether ``stream`` takes a piece, or is broken, within so many seconds."""
    try:
        descriptor = stream.fileno()
    except (AttributeError, OSError, ValueError):
        return True  # no file of the system's: it has no reader that could stop
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(seconds * 1000))


def _loss(number: int) -> logging.LogRecord:
    event, fields = "log lines dropped", {"number": number}
    return logging.makeLogRecord(
        {
            "name": "trioserve.log",
            "levelno": logging.WARNING,
            "levelname": "WARNING",
            "msg": f"{event} number={number}",
            "event": event,
            "fields": fields,
        }
    )
