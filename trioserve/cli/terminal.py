"""The terminal of ``trioserve chat`` and ``trioserve generate``: lines in, text out.

A thread reads the lines, and the command may end while it waits for one. So the thread must not
hold a lock that the interpreter needs at exit: at a terminal it is in ``input``, and from a pipe it
reads without a buffer.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import TextIO

import trio

from trioserve.cli.history import History
from trioserve.cli.output import writing
from trioserve.protocol.log_output import escaped

PROMPT = "> "
_CONTROLS = dict.fromkeys(
    code
    for code in [*range(32), *range(127, 160), *range(0x2028, 0x202F), *range(0x2066, 0x206A)]
    if chr(code) not in "\n\t"
)
"""Control characters that could move the cursor, ring the bell, change the title or reverse the
order of characters. Other format characters are part of texts in some languages."""
_PLAIN_PASTE = "\x1b[?2004l"
"""Sequence that turns bracketed paste off; readline turns it on at the prompt."""


class Terminal:
    """Lines from stdin, text to stdout, notes to stderr.

    ``history`` keeps the lines of a terminal; lines from a pipe aren't kept.
    """

    def __init__(
        self, stdin: TextIO, stdout: TextIO, stderr: TextIO, history: History | None = None
    ) -> None:
        self._stdin = stdin
        self._stdout = stdout
        self._stderr = stderr
        self._history = history or History(None)
        self._prompt = PROMPT
        self.interactive = stdin.isatty() and stdout.isatty()
        """True if stdin and stdout are a terminal."""
        self._readline = _readline() if self.interactive else None
        self._lines = None if self.interactive else _unbuffered_lines(stdin)
        self._dumb = os.environ.get("TERM", "dumb") == "dumb"
        self._styled = stdout.isatty() and not self._dumb and not os.environ.get("NO_COLOR")

    @classmethod
    def standard(cls, history: History | None = None) -> Terminal:
        """Return a terminal with the process's stdin, stdout and stderr."""
        return cls(sys.stdin, sys.stdout, sys.stderr, history)

    async def read_line(self, prompt: str = PROMPT) -> str | None:
        """Return the next line without its line end; None at the end of the input.

        A pasted text with line breaks is one line, if the terminal has bracketed paste.
        """
        self._prompt = prompt
        return await trio.to_thread.run_sync(self._read_line, abandon_on_cancel=True)

    def _read_line(self) -> str | None:
        if self._lines is not None:
            return next(self._lines, None)
        try:
            return input(self._prompt)
        except EOFError:
            self.write("\n")
            return None

    def remember(self, entry: str) -> None:
        """Add ``entry`` to the history of this chat and later ones."""
        if self._readline is not None:
            self._readline.add_history(entry)
        if self.interactive:
            self._history.append(entry)

    def write(self, text: str, *, faint: bool = False) -> None:
        """Write ``text`` at once; at a terminal without control characters."""
        if self._stdout.isatty():
            text = text.translate(_CONTROLS)
        # Replace characters, such as emoji, that a terminal without UTF-8 can't show.
        encoding = self._stdout.encoding or "utf-8"
        text = text.encode(encoding, "replace").decode(encoding)
        if faint and self._styled:
            text = f"\x1b[2m{text}\x1b[22m"
        with writing():
            self._stdout.write(text)
            self._stdout.flush()

    def note(self, line: str) -> None:
        """Print a line that isn't output to stderr."""
        print(escaped(line, keep="\n\t"), file=self._stderr, flush=True)

    def ask_again(self) -> None:
        """Show the prompt again, with the characters typed so far."""
        typed = "" if self._readline is None else self._readline.get_line_buffer()
        self.write(self._prompt + typed)

    @contextlib.contextmanager
    def line_editing(self) -> Iterator[None]:
        """Set up arrow keys and history at the prompt, and restore the terminal at the end."""
        marks_pastes = self._prepare_readline()
        try:
            import termios
        except ImportError:
            yield
            return
        before = termios.tcgetattr(self._stdin.fileno())
        try:
            yield
        finally:
            termios.tcsetattr(self._stdin.fileno(), termios.TCSADRAIN, before)
            # The thread that still waits for a line can't turn bracketed paste off.
            if marks_pastes:
                with writing():
                    self._stdout.write(_PLAIN_PASTE)
                    self._stdout.flush()

    def _prepare_readline(self) -> bool:
        """Set readline's history; return True if it has turned bracketed paste on."""
        readline = self._readline
        if readline is None:
            return False
        readline.set_auto_history(False)  # A message of several lines is one entry.
        for entry in self._history.read():
            readline.add_history(entry)
        # Python turns bracketed paste off, for programs that expect no breaks in lines. libedit,
        # which may replace readline, doesn't have it.
        if self._dumb or "libedit" in (readline.__doc__ or ""):
            return False
        readline.parse_and_bind("set enable-bracketed-paste on")
        return True


def _readline() -> ModuleType | None:
    """Import readline, which then edits the lines of ``input``; return None without it."""
    try:
        import readline
    except ImportError:
        return None
    return readline


def _unbuffered_lines(stdin: TextIO) -> Iterator[str]:
    with open(stdin.fileno(), "rb", buffering=0, closefd=False) as raw:
        while line := raw.readline():
            yield line.decode("utf-8", "replace").rstrip("\r\n")
