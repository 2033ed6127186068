"""The log handler of the server and its worker: it writes to stderr, which may be stuck.

It imports only the standard library, because the worker shares it.
"""

from __future__ import annotations

import logging
import select
import sys
from typing import TextIO

WORKER_LOG = "_TRIOSERVE_WORKER_LOG"
"""The environment variable that tells a worker how to log: the format, a colon, the level."""

PATIENCE = 0.05
"""Seconds that a line waits for the reader of stderr. The server and the worker wait with it."""
PIECE = 1000
"""Characters that a pipe takes at once or not at all: at most 4 bytes each, of 4096."""


def escaped(text: str, keep: str = "") -> str:
    """Return ``text`` with an escape for each character that can't be printed.

    Such a character could move the cursor of a terminal, hide what comes before it or turn its
    order around: control and format characters, line ends, surrogates, unassigned ones.

    Args:
        text: from a client, a model, a file or another server.
        keep: characters to leave as they are.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in keep else ascii(character)[1:-1]
        for character in text
    )


class StderrHandler(logging.Handler):
    """Log handler for ``sys.stderr`` as it is at the time, since a progress bar replaces it.

    A write to a full pipe or a stopped terminal would block for ever, and every request with it. So
    a line is dropped if it can't be written soon or at all (the disk is full, the reader has left).
    The next line that is written tells how many were lost.
    """

    def __init__(self) -> None:
        super().__init__()
        self._num_dropped = 0
        self._is_torn = False
        """True if only the beginning of the last line was written."""

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
        """Write ``text``; return True if all of it was written."""
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
    """Return True if ``stream`` becomes writable, or is broken, within ``seconds``."""
    try:
        descriptor = stream.fileno()
    except (AttributeError, OSError, ValueError):
        return True  # not a file of the system: no reader can block it
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
