"""`trioserve chat` and `trioserve generate`, from pipes and at a pseudo-terminal."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import attrs
import pytest
import trio

from tests.fake_chat_engine import FakeEngine
from trioserve.cli import terminal
from trioserve.cli.terminal import Terminal
from trioserve.errors import ContextTooLong
from trioserve.sampling import SamplingParams

ROOT = Path(__file__).parent.parent


@attrs.define
class Pipes:
    """A terminal that is none: lines from a pipe, output and notes into strings."""

    terminal: Terminal
    stdout: io.StringIO
    stderr: io.StringIO


@contextlib.contextmanager
def piped(text: str, *, ends: bool = True) -> Iterator[Pipes]:
    """Input that is ``text``, and then ends or never does."""
    reader, writer = os.pipe()
    stdout, stderr = io.StringIO(), io.StringIO()
    with open(reader) as stdin:
        with open(writer, "wb") as end:
            end.write(text.encode())
            end.flush()
            if not ends:
                yield Pipes(Terminal(stdin, stdout, stderr), stdout, stderr)
        if ends:
            yield Pipes(Terminal(stdin, stdout, stderr), stdout, stderr)


async def chat(
    lines: str, *, system: str | None = None, params: SamplingParams | None = None
) -> tuple[FakeEngine, Pipes]:
    engine = FakeEngine()
    with piped(lines) as pipes:
        await terminal.chat(
            engine.as_engine(),
            system=system,
            params=params or SamplingParams(),
            terminal=pipes.terminal,
        )
    return engine, pipes


async def test_a_piped_chat_keeps_the_conversation() -> None:
    params = SamplingParams(temperature=0.5)
    engine, pipes = await chat("hello there\n\nÄpfel 🍏", system="Be brief.", params=params)
    assert pipes.stdout.getvalue() == "hello there\nÄpfel 🍏\n"
    assert [list(prompt.messages) for prompt in engine.prompts] == [
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hello there"},
        ],
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hello there"},
            {"role": "assistant", "content": "hello there"},
            {"role": "user", "content": "Äpfel 🍏"},
        ],
    ]
    assert engine.params == [params, params]
    assert all(stream.left for stream in engine.streams)


async def test_speed_and_an_end_by_length_are_noted() -> None:
    _, pipes = await chat("one\nthree words cut\n")
    first, second = pipes.stderr.getvalue().splitlines()
    assert first.startswith("[1 token, first after ")
    assert second.startswith("[3 tokens, ")
    assert " tokens/s, first after " in second
    assert second.endswith(", ended by length]")


async def test_commands() -> None:
    engine, pipes = await chat("one\n/clear\ntwo\n/help\n/nonsense\n /exit is text\n/exit\nthree\n")
    asked = [[m["content"] for m in prompt.messages] for prompt in engine.prompts]
    assert asked == [["one"], ["two"], ["two", "two", " /exit is text"]]
    notes = pipes.stderr.getvalue()
    assert "The conversation is forgotten." in notes
    assert terminal.HELP in notes
    assert "There is no command /nonsense" in notes


async def test_a_refusal_ends_a_piped_chat() -> None:
    with pytest.raises(ContextTooLong):
        await chat("refuse\nnever asked\n")


@pytest.mark.parametrize(("prompt", "output"), [("one two", "one two\n"), ("", "\n")])
async def test_generate_streams_the_text_and_a_line_end(prompt: str, output: str) -> None:
    engine = FakeEngine()
    with piped("") as pipes:
        await terminal.generate(
            engine.as_engine(), prompt, SamplingParams(), terminal=pipes.terminal
        )
    assert pipes.stdout.getvalue() == output
    assert pipes.stderr.getvalue() == ""
    assert engine.prompts == [prompt]


async def test_a_chat_can_be_cancelled_while_it_waits_for_a_line() -> None:
    with piped("", ends=False) as pipes, trio.move_on_after(0.05) as scope:
        engine = FakeEngine().as_engine()
        await terminal.chat(engine, system=None, params=SamplingParams(), terminal=pipes.terminal)
    assert scope.cancelled_caught


def test_text_that_the_terminal_can_not_show_is_replaced() -> None:
    raw = io.BytesIO()
    stdout: TextIO = io.TextIOWrapper(raw, encoding="ascii")
    with piped("") as pipes:
        Terminal(pipes.terminal._stdin, stdout, pipes.stderr).write("naïve 🍏")
    assert raw.getvalue() == b"na?ve ?"


@attrs.define
class Person:
    """Somebody at a pseudo-terminal in which the fake engine's chat runs."""

    descriptor: int
    seen: str = ""

    def type(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    def wait_for(self, text: str, within: float = 120.0) -> str:
        """Read until ``text`` shows; what was seen up to its end, which is then forgotten."""
        deadline = time.monotonic() + within
        while text not in self.seen:
            assert time.monotonic() < deadline, self.seen
            try:
                self.seen += os.read(self.descriptor, 65536).decode()
            except OSError:  # the other side has closed the terminal
                raise AssertionError(f"{text!r} never came: {self.seen!r}") from None
        before, _, self.seen = self.seen.partition(text)
        return before


@contextlib.contextmanager
def at_a_terminal() -> Iterator[Person]:
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fake_chat_engine"],
        cwd=ROOT,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        preexec_fn=lambda: os.login_tty(theirs),  # so that Ctrl-C there is its signal
        env={**os.environ, "TERM": "dumb"},
    )
    try:
        yield Person(ours)
        assert process.wait(120) == 0
        assert termios.tcgetattr(theirs) == before
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


def test_ctrl_c_stops_the_reply_and_the_chat_goes_on() -> None:
    with at_a_terminal() as person:
        person.wait_for("> ")
        person.type("hello you\n")
        person.wait_for("hello you\r\nhello you\r\n[2 tokens")
        person.wait_for("> ")
        person.type("forever\n")
        person.wait_for("forever forever forever")
        person.type("\x03")
        person.wait_for(", stopped]\r\n> ")
        person.type("refuse\n")
        person.wait_for("too long (/clear starts a new conversation)\r\n> ")
        person.type("still here\n")
        person.wait_for("still here\r\nstill here\r\n")
        person.wait_for("> ")
        person.type("/exit\n")
        person.wait_for("left")


def test_the_second_ctrl_c_at_the_prompt_leaves() -> None:
    with at_a_terminal() as person:
        person.wait_for("> ")
        person.type("half a mess")
        person.wait_for("half a mess")
        person.type("\x03")
        person.wait_for("Ctrl-C again, Ctrl-D or /exit leaves.\r\n> half a mess")
        person.type("age\n")
        person.wait_for("half a message\r\n[3 tokens")
        person.wait_for("> ")
        person.type("\x03")
        person.wait_for("Ctrl-C again")
        person.type("\x03")
        person.wait_for("left")


def test_ctrl_d_leaves() -> None:
    with at_a_terminal() as person:
        person.wait_for("> ")
        person.type("\x04")
        person.wait_for("left")
