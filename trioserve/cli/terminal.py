"""The front ends of ``trioserve chat`` and ``trioserve generate``: an engine and a terminal.

Lines are read in a thread that is left behind when the command ends while it waits for one, so it
must hold no lock that the interpreter wants on its way out: at a terminal it is in ``input``, and
from a pipe it reads without a buffer. Ctrl-C is taken over by :func:`chat` at a terminal, and only
there: it stops the reply, and at the prompt a second one leaves. Everywhere else it is Python's own
KeyboardInterrupt.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, TextIO

import attrs
import trio

from trioserve.cli.output import writing
from trioserve.errors import InvalidRequest
from trioserve.groups import sole_exception
from trioserve.request import ChatPrompt
from trioserve.sampling import SamplingParams

if TYPE_CHECKING:
    from trioserve.engine import Engine
    from trioserve.generation import PromptLike
    from trioserve.stream import Chunk

__all__ = ["Terminal", "chat", "generate"]

PROMPT = "> "
HELP = """\
Write a message and press Enter. A line that begins with / is a command:
  /clear   forget the conversation
  /help    show this
  /exit    leave (also Ctrl-D)
Ctrl-C stops a reply. To send a line that begins with /, put a space before it."""
_CONTROLS = {code: None for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t"}
"""What a model may not do to a terminal: move its cursor, ring its bell, change its title."""


class Terminal:
    """Lines in, text out, notes for the person on stderr."""

    def __init__(self, stdin: TextIO, stdout: TextIO, stderr: TextIO) -> None:
        self._stdin = stdin
        self._stdout = stdout
        self._stderr = stderr
        self.interactive = stdin.isatty() and stdout.isatty()
        """Whether somebody sits there, rather than a file or a pipe at either end."""
        self._lines = None if self.interactive else _unbuffered_lines(stdin)

    @classmethod
    def standard(cls) -> Terminal:
        """The process's own stdin, stdout and stderr."""
        return cls(sys.stdin, sys.stdout, sys.stderr)

    async def read_line(self) -> str | None:
        """The next line without its end, None when there is none. At a terminal, asks for it."""
        return await trio.to_thread.run_sync(self._read_line, abandon_on_cancel=True)

    def _read_line(self) -> str | None:
        if self._lines is not None:
            return next(self._lines, None)
        try:
            return input(PROMPT)
        except EOFError:
            self.write("\n")
            return None

    def write(self, text: str) -> None:
        """Show ``text`` at once, without what would control the terminal."""
        if self._stdout.isatty():
            text = text.translate(_CONTROLS)
        # A terminal that isn't UTF-8 must not end the reply at the first emoji.
        encoding = self._stdout.encoding or "utf-8"
        with writing():
            self._stdout.write(text.encode(encoding, "replace").decode(encoding))
            self._stdout.flush()

    def note(self, line: str) -> None:
        """Tell the person something that isn't output."""
        print(line, file=self._stderr, flush=True)

    def ask_again(self) -> None:
        """Put the prompt, and what has been typed at it, on a new line."""
        typed = ""
        with contextlib.suppress(ImportError):
            import readline

            typed = readline.get_line_buffer()
        self.write(PROMPT + typed)

    @contextlib.contextmanager
    def line_editing(self) -> Iterator[None]:
        """Arrow keys and history at the prompt; afterwards the terminal is as it was."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (input() uses it once it is there)
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


def _unbuffered_lines(stdin: TextIO) -> Iterator[str]:
    with open(stdin.fileno(), "rb", buffering=0, closefd=False) as raw:
        while line := raw.readline():
            yield line.decode("utf-8", "replace").rstrip("\r\n")


async def generate(
    engine: Engine,
    prompt: PromptLike,
    params: SamplingParams,
    *,
    terminal: Terminal | None = None,
) -> None:
    """Stream the continuation of ``prompt`` to stdout, with a line end at its end."""
    terminal = terminal or Terminal.standard()
    last = ""
    async with engine.generate(prompt, params) as stream:
        async for chunk in stream:
            terminal.write(chunk.text)
            last = chunk.text or last
    if not last.endswith("\n"):
        terminal.write("\n")


async def chat(
    engine: Engine,
    *,
    system: str | None,
    params: SamplingParams,
    terminal: Terminal | None = None,
) -> None:
    """Talk to the model until the input ends or says /exit.

    At a terminal, must be called from the main thread (it takes SIGINT over), and a message that
    the engine refuses is only reported. From a pipe, every line is a message, and a refusal is
    raised.
    """
    terminal = terminal or Terminal.standard()
    conversation = _Conversation(engine, system, params, terminal)
    if not terminal.interactive:
        await conversation.run()
        return
    terminal.note("Ctrl-C stops a reply, Ctrl-D leaves, /help shows more.")
    failure: BaseException | None = None
    with terminal.line_editing(), trio.open_signal_receiver(signal.SIGINT) as interrupts:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(conversation.obey, interrupts, nursery.cancel_scope)
                await conversation.run()
                nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            failure = sole_exception(group)
    if failure is not None:
        raise failure


@attrs.define(eq=False)
class _Conversation:
    engine: Engine
    system: str | None
    params: SamplingParams
    terminal: Terminal
    messages: list[dict[str, Any]] = attrs.field(factory=list)
    reply_scope: trio.CancelScope | None = None
    """Around the reply that is being written, if one is."""
    leave_on_interrupt: bool = False

    async def run(self) -> None:
        while (line := await self.terminal.read_line()) is not None:
            self.leave_on_interrupt = False
            if line.startswith("/"):
                if line.strip() == "/exit":
                    return
                self._command(line.strip())
            elif line.strip():
                await self._answer(line)

    async def obey(self, interrupts: AsyncIterator[int], whole: trio.CancelScope) -> None:
        """Stop the reply on an interrupt; between replies, end ``whole`` on the second in a row."""
        async for _ in interrupts:
            if self.reply_scope is not None:
                self.reply_scope.cancel()
            elif self.leave_on_interrupt:
                self.terminal.write("\n")
                whole.cancel()
            else:
                self.leave_on_interrupt = True
                self.terminal.note("\nCtrl-C again, Ctrl-D or /exit leaves.")
                self.terminal.ask_again()

    def _command(self, name: str) -> None:
        if name == "/clear":
            self.messages.clear()
            self.terminal.note("The conversation is forgotten.")
        elif name == "/help":
            self.terminal.note(HELP)
        else:
            self.terminal.note(f"There is no command {name}; /help lists them.")

    async def _answer(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})
        reply = _Reply(trio.current_time())
        try:
            with trio.CancelScope() as self.reply_scope:
                await self._stream(reply)
        except InvalidRequest as error:
            self.messages.pop()
            if not self.terminal.interactive:
                raise
            self.terminal.note(f"{error} (/clear starts a new conversation)")
            return
        finally:
            self.reply_scope = None
        self.terminal.write("\n")
        self.terminal.note(f"[{reply.summary()}]")
        if reply.text:
            self.messages.append({"role": "assistant", "content": reply.text})
        else:  # stopped before it began: as if nothing had been asked
            self.messages.pop()

    async def _stream(self, reply: _Reply) -> None:
        system = [{"role": "system", "content": self.system}] if self.system is not None else []
        prompt = ChatPrompt(messages=(*system, *self.messages))
        async with self.engine.generate(prompt, self.params) as stream:
            async for chunk in stream:
                reply.add(chunk, trio.current_time())
                self.terminal.write(chunk.text)


@attrs.define
class _Reply:
    """A reply so far, and how fast it came. Times are seconds on trio's clock."""

    asked: float
    text: str = ""
    finish_reason: str | None = None
    _first: float = 0.0
    _last: float = 0.0
    _num_tokens: int = 0
    _num_first: int = 0

    def add(self, chunk: Chunk, now: float) -> None:
        self.text += chunk.text
        self.finish_reason = chunk.finish_reason
        if chunk.token_ids:
            if not self._num_tokens:
                self._first, self._num_first = now, len(chunk.token_ids)
            self._last = now
            self._num_tokens += len(chunk.token_ids)

    def summary(self) -> str:
        """For a person: ``34 tokens, 92.1 tokens/s, first after 0.08 s``."""
        facts = [f"{self._num_tokens} token{'s' if self._num_tokens != 1 else ''}"]
        seconds = self._last - self._first
        if seconds > 0:
            facts.append(f"{(self._num_tokens - self._num_first) / seconds:.1f} tokens/s")
        if self._num_tokens:
            facts.append(f"first after {self._first - self.asked:.2f} s")
        if self.finish_reason is None:
            facts.append("stopped")
        elif self.finish_reason != "stop":
            facts.append(f"ended by {self.finish_reason}")
        return ", ".join(facts)
