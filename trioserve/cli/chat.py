"""``trioserve chat``: a conversation at a terminal, or from a pipe.

At a terminal Ctrl-C stops the reply, and at the prompt a second one exits. From a pipe it raises
KeyboardInterrupt.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from typing import Any

import attrs
import trio

from trioserve._util.exception_groups import sole_exception
from trioserve.cli.chat_backends import ChatBackend, ChatReply, Piece
from trioserve.cli.conversation import ChatConversation
from trioserve.cli.terminal import Terminal
from trioserve.load.remote import RefusedRequest, RemoteError
from trioserve.protocol.errors import InvalidRequest, printable

BLOCK = '"""'
CONTINUATION = ". "


async def chat(
    backend: ChatBackend, conversation: ChatConversation, *, terminal: Terminal | None = None
) -> None:
    """Chat until the input ends or has the command /exit.

    At a terminal, call this from the main thread, because it handles SIGINT. A refused message or a
    lost reply is reported there. From a pipe, every line is a message, and a refusal is raised.
    """
    terminal = terminal or Terminal.standard()
    loop = _ChatLoop(backend, conversation, terminal)
    if not terminal.interactive:
        await loop.run()
        return
    terminal.note(_welcome(backend))
    failure: BaseException | None = None
    with terminal.line_editing(), trio.open_signal_receiver(signal.SIGINT) as interrupts:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(loop.on_interrupts, interrupts, nursery.cancel_scope)
                await loop.run()
                nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            failure = sole_exception(group)
    if failure is not None:
        raise failure


def _welcome(backend: ChatBackend) -> str:
    length = backend.max_model_len
    context = "" if length is None else f", {length:,} tokens of context"
    keys = "Ctrl-C stops a reply, Ctrl-D leaves, /help shows more."
    return f"{printable(backend.name)}{context}. {keys}"


@attrs.define(eq=False)
class _ChatLoop:
    backend: ChatBackend
    conversation: ChatConversation
    terminal: Terminal
    reply_scope: trio.CancelScope | None = None
    """Cancel scope of the reply in progress; None between replies."""
    leave_on_interrupt: bool = False

    async def run(self) -> None:
        while (line := await self.terminal.read_line()) is not None:
            self.leave_on_interrupt = False
            text = await self._whole_message(line)
            if not text.strip():
                continue
            self.terminal.remember(line if text == line else f"{BLOCK}{text}{BLOCK}")
            command = line.strip() if line.startswith("/") else ""
            if command in ("/exit", "/quit"):
                return
            if command == "/regenerate":
                await self._regenerate()
            elif command:
                self.terminal.note(self.conversation.command(command))
            else:
                await self._answer(self.conversation.messages, text)

    async def _whole_message(self, line: str) -> str:
        """Return the message that begins with ``line``, with all its lines."""
        lines = [line]
        if line.startswith(BLOCK):
            lines = [line.removeprefix(BLOCK)]
            while not lines[-1].rstrip().endswith(BLOCK) and await self._read_more(lines):
                pass
            return "\n".join(lines).rstrip().removesuffix(BLOCK).strip("\n")
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1].removesuffix("\\")
            if not await self._read_more(lines):
                break
        return "\n".join(lines)

    async def _read_more(self, lines: list[str]) -> bool:
        line = await self.terminal.read_line(CONTINUATION)
        self.leave_on_interrupt = False
        if line is not None:
            lines.append(line)
        return line is not None

    async def on_interrupts(self, interrupts: AsyncIterator[int], whole: trio.CancelScope) -> None:
        """Stop the reply at an interrupt; between replies, cancel ``whole`` at the second one."""
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

    async def _regenerate(self) -> None:
        messages = self.conversation.messages
        if messages:
            await self._answer(messages[:-2], messages[-2]["content"])
        else:
            self.terminal.note("There is nothing to answer again.")

    async def _answer(self, before: list[dict[str, Any]], text: str) -> None:
        """Get a reply to ``text`` after ``before``; keep both if there is any reply."""
        asked = [*before, {"role": "user", "content": text}]
        statistics = _ReplyStatistics(trio.current_time())
        error: InvalidRequest | RemoteError | None = None
        try:
            with trio.CancelScope() as self.reply_scope:
                await self._stream(self.conversation.with_system(asked), statistics)
        except (InvalidRequest, RemoteError) as refusal:
            if not self.terminal.interactive:
                raise
            error = refusal
        finally:
            self.reply_scope = None
        if error is None or statistics.text:
            self.terminal.write("\n")
            self.terminal.note(f"[{statistics.summary(self.backend.max_model_len)}]")
        if error is not None:
            self.terminal.note(f"{error}{_advice(error)}")
        if statistics.text:
            reply = {"role": "assistant", "content": statistics.text}
            self.conversation.messages = [*asked, reply]

    async def _stream(self, messages: list[dict[str, Any]], statistics: _ReplyStatistics) -> None:
        async with self.backend.reply(messages, self.conversation.fields) as reply:
            try:
                async for piece in reply:
                    if piece.reasoning:
                        self.terminal.write(piece.reasoning, faint=True)
                    elif piece.text and statistics.reasons:
                        self.terminal.write("\n\n")
                    self.terminal.write(piece.text)
                    statistics.add(piece, trio.current_time())
            finally:
                statistics.add_usage(reply)


def _advice(error: InvalidRequest | RemoteError) -> str:
    refused = isinstance(error, InvalidRequest) or (
        isinstance(error, RefusedRequest) and error.status == 400
    )
    return " (/clear starts a new conversation)" if refused else ""


@attrs.define(eq=False)
class _ReplyStatistics:
    """The text and the rate of a reply so far. Times are seconds on trio's clock."""

    sent: float
    text: str = ""
    reasons: bool = False
    """True while reasoning is shown."""
    _finish_reason: str | None = None
    _first: float = 0.0
    _last: float = 0.0
    _num_tokens: int = 0
    _num_first: int = 0
    _num_context_tokens: int | None = None

    def add(self, piece: Piece, now: float) -> None:
        """Add a piece received at ``now``."""
        self.text += piece.text
        self.reasons = bool(piece.reasoning) or (self.reasons and not piece.text)
        self._finish_reason = piece.finish_reason
        if piece.num_tokens:
            if not self._num_tokens:
                self._first, self._num_first = now, piece.num_tokens
            self._last = now
            self._num_tokens += piece.num_tokens

    def add_usage(self, reply: ChatReply) -> None:
        """Add the token counts of ``reply`` at its end."""
        self._num_tokens = reply.num_tokens or self._num_tokens
        self._num_context_tokens = reply.num_context_tokens

    def summary(self, max_model_len: int | None) -> str:
        """Return ``34 tokens, 92.1 tokens/s, first after 0.08 s, context 120 of 8,192``."""
        facts = [f"{self._num_tokens:,} token{'s' if self._num_tokens != 1 else ''}"]
        seconds = self._last - self._first
        if seconds > 0:
            facts.append(f"{(self._num_tokens - self._num_first) / seconds:.1f} tokens/s")
        if self._num_tokens:
            facts.append(f"first after {self._first - self.sent:.2f} s")
        if self._num_context_tokens is not None:
            limit = "" if max_model_len is None else f" of {max_model_len:,}"
            facts.append(f"context {self._num_context_tokens:,}{limit}")
        if self._finish_reason is None:
            facts.append("stopped")
        elif self._finish_reason != "stop":
            facts.append(f"ended by {self._finish_reason}")
        return ", ".join(facts)
