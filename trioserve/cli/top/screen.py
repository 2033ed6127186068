"""The terminal in full-screen mode: no echo, single keys, all restored at the end."""

from __future__ import annotations

import contextlib
import os
import termios
import tty
from collections.abc import Iterator
from typing import Any, TextIO

import attrs
import rich.console
import rich.live
import trio
from rich.text import Text

from trioserve.cli.output import writing
from trioserve.cli.top.glyphs import ASCII, UNICODE, Glyphs
from trioserve.cli.top.keys import KeyReader


def glyphs_of(console: rich.console.Console) -> Glyphs:
    """Return the glyphs that the terminal of ``console`` can show."""
    return UNICODE if console.encoding.startswith("utf") else ASCII


@attrs.define(eq=False)
class Screen:
    """The terminal at ``stdin`` and ``console``."""

    _stdin: TextIO
    _console: rich.console.Console
    _before: list[Any] | None = None
    """Settings of the terminal to restore; None while they are unchanged."""
    _live: rich.live.Live | None = None
    _reader: KeyReader = attrs.field(factory=KeyReader)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Open a block in full-screen mode; the terminal is restored at its end."""
        try:
            self.take()
            yield
        finally:
            self.restore()

    def take(self) -> None:
        """Switch to the alternate screen, and read keys at once, without echo."""
        self._before = termios.tcgetattr(self._stdin.fileno())
        tty.setcbreak(self._stdin.fileno())
        self._live = rich.live.Live(
            console=self._console,
            screen=True,
            auto_refresh=False,  # It would need a thread.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        with writing():
            self._live.start()

    def restore(self) -> None:
        """Restore the terminal. Idempotent."""
        live, self._live = self._live, None
        before, self._before = self._before, None
        try:
            # The terminal may be gone.
            with contextlib.suppress(OSError):
                if live is not None:
                    live.stop()
        finally:
            with contextlib.suppress(termios.error):
                if before is not None:
                    termios.tcsetattr(self._stdin.fileno(), termios.TCSADRAIN, before)

    @property
    def size(self) -> tuple[int, int]:
        """Present number of columns and lines."""
        # rich would use the size in the environment.
        with contextlib.suppress(OSError):
            self._console.size = rich.console.ConsoleDimensions(
                *os.get_terminal_size(self._stdin.fileno())
            )
        return self._console.size

    def show(self, text: Text) -> None:
        """Show ``text`` on the screen, unless the terminal has been restored."""
        if self._live is not None:
            with writing():
                self._live.update(text, refresh=True)

    async def read_keys(self) -> list[str] | None:
        """Block until keys are pressed and return them; None if the terminal is gone."""
        descriptor = self._stdin.fileno()
        await trio.lowlevel.wait_readable(descriptor)
        try:
            data = os.read(descriptor, 1024)
        except OSError:
            return None
        return self._reader.feed(data) if data else None
