"""A user at a pseudo-terminal with a running program."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

__all__ = ["Person", "person_at"]

ROOT = Path(__file__).parents[2]
_PATIENCE = 60.0
"""Seconds to wait for anything; a slow machine is no failure."""


@attrs.define
class Person:
    """A user that types and reads. Waits are for output, never for time."""

    descriptor: int
    process: subprocess.Popen[bytes]
    seen: str = ""

    def type(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    def wait_for(self, text: str) -> str:
        """Read until ``text`` shows; what was seen up to its end, which is then forgotten."""
        deadline = time.monotonic() + _PATIENCE
        while text not in self.seen:
            ended = self.process.poll() is not None
            if not self._read() and (ended or time.monotonic() > deadline):
                raise AssertionError(f"{text!r} never came: {self.seen[-2000:]!r}")
        before, _, self.seen = self.seen.partition(text)
        return before

    def wait(self) -> int:
        """Read until the program has ended; its exit code."""
        deadline = time.monotonic() + _PATIENCE
        while self.process.poll() is None:
            self._read()
            assert time.monotonic() < deadline, f"it goes on: {self.seen[-2000:]!r}"
        return self.process.returncode

    def resize(self, columns: int, lines: int) -> None:
        """Make the window another size, which the program is told of by SIGWINCH."""
        size = struct.pack("HHHH", lines, columns, 0, 0)
        fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, size)

    def _read(self) -> bool:
        """Read what there is, or comes soon; False where nothing does."""
        ready, _, _ = select.select([self.descriptor], [], [], 0.1)
        if ready:
            self.seen += os.read(self.descriptor, 65536).decode("utf-8", "replace")
        return bool(ready)


@contextlib.contextmanager
def person_at(
    command: Sequence[str], *, columns: int = 80, lines: int = 24, **environment: str
) -> Iterator[Person]:
    """Run ``command`` in a terminal of that size, which must be as before once the block is left.

    ``environment`` is joined into this process's own.
    """
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        preexec_fn=lambda: os.login_tty(theirs),  # so that Ctrl-C there is its signal
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )
    person = Person(ours, process)
    person.resize(columns, lines)
    try:
        yield person
        person.wait()
        assert termios.tcgetattr(theirs) == before
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)
