"""The terminal while a picture fills it: no echo, keys one by one, and as it was afterwards."""

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

__all__ = ["Screen", "glyphs_of"]


def glyphs_of(console: rich.console.Console) -> Glyphs:
    """What the terminal behind ``console`` can show."""
    return UNICODE if console.encoding.startswith("utf") else ASCII


@attrs.define(eq=False)
class Screen:
    """The terminal at ``stdin`` and ``console``."""

    _stdin: TextIO
    _console: rich.console.Console
    _before: list[Any] | None = None
    """The terminal's settings, while they are changed."""
    _live: rich.live.Live | None = None
    _reader: KeyReader = attrs.field(factory=KeyReader)

    @contextlib.contextmanager
    def ours(self) -> Iterator[None]:
        """Take the terminal, and give it back however the block ends."""
        try:
            self.take()
            yield
        finally:
            self.give_back()

    def take(self) -> None:
        """Keys come at once and unseen, and what is on the screen is put aside."""
        self._before = termios.tcgetattr(self._stdin.fileno())
        tty.setcbreak(self._stdin.fileno())
        self._live = rich.live.Live(
            console=self._console,
            screen=True,
            auto_refresh=False,  # which would take a thread
            redirect_stdout=False,
            redirect_stderr=False,
        )
        with writing():
            self._live.start()

    def give_back(self) -> None:
        """Everything is as it was. Idempotent."""
        live, self._live = self._live, None
        before, self._before = self._before, None
        try:
            # A terminal that is gone has nothing to give back.
            with contextlib.suppress(OSError):
                if live is not None:
                    live.stop()
        finally:
            with contextlib.suppress(termios.error):
                if before is not None:
                    termios.tcsetattr(self._stdin.fileno(), termios.TCSADRAIN, before)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines, as they are now."""
        # Where the environment names a size, rich goes by that for good.
        with contextlib.suppress(OSError):
            self._console.size = rich.console.ConsoleDimensions(
                *os.get_terminal_size(self._stdin.fileno())
            )
        return self._console.size

    def show(self, text: Text) -> None:
        """Fill the screen with ``text``, if it is ours."""
        if self._live is not None:
            with writing():
                self._live.update(text, refresh=True)

    async def read_keys(self) -> list[str] | None:
        """The keys that are pressed next; None where the terminal is gone."""
        descriptor = self._stdin.fileno()
        await trio.lowlevel.wait_readable(descriptor)
        try:
            data = os.read(descriptor, 1024)
        except OSError:
            return None
        return self._reader.feed(data) if data else None
