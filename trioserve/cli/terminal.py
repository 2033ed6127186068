"""A terminal as ``trioserve chat`` and ``trioserve generate`` use it: lines in, text out.

Lines are read in a thread that is left behind when the command ends while it waits for one, so it
must hold no lock that the interpreter wants on its way out: at a terminal it is in ``input``, and
from a pipe it reads without a buffer.
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

__all__ = ["PROMPT", "Terminal"]

PROMPT = "> "
_CONTROLS = dict.fromkeys(
    code
    for code in [*range(32), *range(127, 160), *range(0x2028, 0x202F), *range(0x2066, 0x206A)]
    if chr(code) not in "\n\t"
)
"""What a model may not do to a terminal: move its cursor, ring its bell, change its title, turn the
order of its characters around. Other format characters belong to texts in some languages."""
_PLAIN_PASTE = "\x1b[?2004l"
"""Tells a terminal not to mark what is pasted any more, as readline has it do at the prompt."""


class Terminal:
    """Lines in, text out, notes for the person on stderr.

    ``history`` is where lines are kept for the next time; those from a pipe never are.
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
        """Whether somebody sits there, rather than a file or a pipe at either end."""
        self._readline = _readline() if self.interactive else None
        self._lines = None if self.interactive else _unbuffered_lines(stdin)
        self._dumb = os.environ.get("TERM", "dumb") == "dumb"
        self._styled = stdout.isatty() and not self._dumb and not os.environ.get("NO_COLOR")

    @classmethod
    def standard(cls, history: History | None = None) -> Terminal:
        """The process's own stdin, stdout and stderr."""
        return cls(sys.stdin, sys.stdout, sys.stderr, history)

    async def read_line(self, prompt: str = PROMPT) -> str | None:
        """The next line without its end, None when there is none. At a terminal, asks for it.

        What is pasted with line breaks in it is one line, where the terminal marks what is pasted.
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
        """Have the arrow keys bring ``entry`` back, now and the next time."""
        if self._readline is not None:
            self._readline.add_history(entry)
        if self.interactive:
            self._history.append(entry)

    def write(self, text: str, *, faint: bool = False) -> None:
        """Show ``text`` at once, without what would control the terminal."""
        if self._stdout.isatty():
            text = text.translate(_CONTROLS)
        # A terminal that isn't UTF-8 must not end the reply at the first emoji.
        encoding = self._stdout.encoding or "utf-8"
        text = text.encode(encoding, "replace").decode(encoding)
        if faint and self._styled:
            text = f"\x1b[2m{text}\x1b[22m"
        with writing():
            self._stdout.write(text)
            self._stdout.flush()

    def note(self, line: str) -> None:
        """Tell the person something that isn't output."""
        print(escaped(line, keep="\n\t"), file=self._stderr, flush=True)

    def ask_again(self) -> None:
        """Put the prompt, and what has been typed at it, on a new line."""
        typed = "" if self._readline is None else self._readline.get_line_buffer()
        self.write(self._prompt + typed)

    @contextlib.contextmanager
    def line_editing(self) -> Iterator[None]:
        """Arrow keys and history at the prompt; afterwards the terminal is as it was."""
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
            # The thread that waits for a line when the chat ends doesn't get to say so.
            if marks_pastes:
                with writing():
                    self._stdout.write(_PLAIN_PASTE)
                    self._stdout.flush()

    def _prepare_readline(self) -> bool:
        """Give readline the lines of before; whether it has the terminal mark what is pasted."""
        readline = self._readline
        if readline is None:
            return False
        readline.set_auto_history(False)  # a message of several lines is one entry
        for entry in self._history.read():
            readline.add_history(entry)
        # Python turns it off, for programs that read lines and don't expect breaks in them.
        # libedit, which may be in readline's place, can't do it.
        if self._dumb or "libedit" in (readline.__doc__ or ""):
            return False
        readline.parse_and_bind("set enable-bracketed-paste on")
        return True


def _readline() -> ModuleType | None:
    """What edits the lines of ``input`` once it is imported; None where Python has none."""
    try:
        import readline
    except ImportError:
        return None
    return readline


def _unbuffered_lines(stdin: TextIO) -> Iterator[str]:
    with open(stdin.fileno(), "rb", buffering=0, closefd=False) as raw:
        while line := raw.readline():
            yield line.decode("utf-8", "replace").rstrip("\r\n")
