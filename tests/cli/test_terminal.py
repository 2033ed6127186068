"""`trioserve chat` and `trioserve generate`, from pipes and at a pseudo-terminal."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import attrs
import pytest
import trio

from tests.support.fake_chat_engine import FakeEngine
from tests.support.pseudo_terminals import Person, person_at
from trioserve.cli import generate as generating
from trioserve.cli.chat import chat
from trioserve.cli.chat_backends import EngineChatBackend
from trioserve.cli.conversation import HELP, ChatConversation
from trioserve.cli.history import History
from trioserve.cli.terminal import Terminal
from trioserve.protocol.errors import ContextTooLong
from trioserve.protocol.sampling import SamplingParams


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


async def chat_of(
    lines: str, conversation: ChatConversation | None = None
) -> tuple[FakeEngine, Pipes]:
    engine = FakeEngine(generation_defaults={"top_k": 7})
    backend = EngineChatBackend(engine.as_engine())
    with piped(lines) as pipes:
        await chat(backend, conversation or ChatConversation(), terminal=pipes.terminal)
    return engine, pipes


def asked(engine: FakeEngine) -> list[list[str]]:
    """Return the texts of each prompt."""
    return [[message["content"] for message in prompt.messages] for prompt in engine.prompts]


async def test_a_piped_chat_keeps_the_conversation() -> None:
    conversation = ChatConversation(system="Be brief.", fields={"temperature": 0.5})
    engine, pipes = await chat_of("hello there\n\nÄpfel 🍏", conversation)
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
    assert engine.params == 2 * [SamplingParams(temperature=0.5, top_k=7)]
    assert all(stream.left for stream in engine.streams)


async def test_speed_and_an_end_by_length_are_noted() -> None:
    _, pipes = await chat_of("one\nthree words cut\n")
    first, second = pipes.stderr.getvalue().splitlines()
    assert first.startswith("[1 token, first after ")
    assert second.startswith("[3 tokens, ")
    assert " tokens/s, first after " in second
    assert first.endswith(" s, context 11 of 2,048]")
    assert second.endswith(" s, context 13 of 2,048, ended by length]")


async def test_commands() -> None:
    engine, pipes = await chat_of("one\n/clear\ntwo\n/help\n/nonsense\n /exit is text\n/exit\nno\n")
    assert asked(engine) == [["one"], ["two"], ["two", "two", " /exit is text"]]
    notes = pipes.stderr.getvalue()
    assert "The conversation is cleared." in notes
    assert HELP in notes
    assert "There is no command /nonsense" in notes


async def test_a_message_may_have_several_lines() -> None:
    engine, _ = await chat_of(
        'one\\\ntwo\n"""\n/clear\n\nis text\n"""\n"""in one"""\n"""and\nunended'
    )
    asked_last = [texts[-1] for texts in asked(engine)]
    assert asked_last == ["one\ntwo", "/clear\n\nis text", "in one", "and\nunended"]


async def test_a_message_is_answered_again() -> None:
    engine, pipes = await chat_of("/regenerate\none\ntwo\n/regenerate\nthree\n")
    assert "nothing to answer again" in pipes.stderr.getvalue()
    second = ["one", "one", "two"]
    assert asked(engine) == [["one"], second, second, [*second, "two", "three"]]


async def test_what_the_model_is_told_and_how_it_is_sampled_change_on_the_way() -> None:
    lines = [
        *("one", "/system Be brief.", "/set temperature=0.25", "/set max-tokens 9", "two"),
        *("/system", "/set temperature", "three", "/set", "/set warmth 1", "/set top_p 2"),
        *("/set max_tokens many", "/set stop END,.", "/set max_tokens", "/set stop", "/set"),
    ]
    engine, pipes = await chat_of("\n".join(lines))
    assert asked(engine)[1:] == [
        ["Be brief.", "one", "one", "two"],
        ["one", "one", "two", "two", "three"],
    ]
    assert [(params.temperature, params.max_tokens) for params in engine.params] == [
        (SamplingParams().temperature, None),
        (0.25, 9),
        (SamplingParams().temperature, 9),
    ]
    notes = [line for line in pipes.stderr.getvalue().splitlines() if not line.startswith("[")]
    assert notes == [
        "The system message is set.",
        "temperature 0.25",
        "temperature 0.25, max_tokens 9",
        "The system message is removed.",
        "max_tokens 9",
        "max_tokens 9",
        *(line for line in notes if line.startswith("There is no warmth; there are max_tokens, ")),
        "top_p must be a number from 0 to 1, got 2.0.",
        "max_tokens must be a whole number; got 'many'.",
        "max_tokens 9, stop END,.",
        "stop END,.",
        "Sampling is the model's own.",
        "Sampling is the model's own.",
    ]


async def test_a_conversation_is_saved_and_nothing_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    conversation = ChatConversation(system="Be brief.")
    lines = f"Äpfel\n/save {path}\n/save {path}\n/save\n/save {tmp_path}/none/talk\n"
    _, pipes = await chat_of(lines, conversation)
    assert json.loads(path.read_text()) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Äpfel"},
        {"role": "assistant", "content": "Äpfel"},
    ]
    notes = pipes.stderr.getvalue().splitlines()[1:]
    assert notes == [
        f"The conversation is in {path}.",
        f"{path} can't be written: File exists.",
        "/save needs the name of a file.",
        f"{tmp_path}/none/talk can't be written: No such file or directory.",
    ]


async def test_a_refusal_ends_a_piped_chat() -> None:
    with pytest.raises(ContextTooLong):
        await chat_of("refuse\nnever asked\n")


async def test_nothing_from_a_pipe_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    with piped("one\n") as pipes:
        own = pipes.terminal
        terminal = Terminal(own._stdin, own._stdout, own._stderr, History(path))
        await chat(
            EngineChatBackend(FakeEngine().as_engine()), ChatConversation(), terminal=terminal
        )
    assert pipes.stdout.getvalue() == "one\n"
    assert not path.exists()


@pytest.mark.parametrize(("prompt", "output"), [("one two", "one two\n"), ("", "\n")])
async def test_generate_streams_the_text_and_a_line_end(prompt: str, output: str) -> None:
    engine = FakeEngine()
    with piped("") as pipes:
        await generating.generate(
            engine.as_engine(), prompt, SamplingParams(), terminal=pipes.terminal
        )
    assert pipes.stdout.getvalue() == output
    assert pipes.stderr.getvalue() == ""
    assert engine.prompts == [prompt]


async def test_a_chat_can_be_cancelled_while_it_waits_for_a_line() -> None:
    with piped("", ends=False) as pipes, trio.move_on_after(0.05) as scope:
        backend = EngineChatBackend(FakeEngine().as_engine())
        await chat(backend, ChatConversation(), terminal=pipes.terminal)
    assert scope.cancelled_caught


def test_text_that_the_terminal_can_not_show_is_replaced() -> None:
    raw = io.BytesIO()
    stdout: TextIO = io.TextIOWrapper(raw, encoding="ascii")
    with piped("") as pipes:
        Terminal(pipes.terminal._stdin, stdout, pipes.stderr).write("naïve 🍏")
    assert raw.getvalue() == b"na?ve ?"


@contextlib.contextmanager
def at_a_terminal(**environment: str) -> Iterator[Person]:
    command = [sys.executable, "-m", "tests.support.fake_chat_engine"]
    environment = {"TERM": "dumb", "TRIOSERVE_HISTORY": "off", **environment}
    with person_at(command, **environment) as person:
        yield person
        assert person.wait() == 0


def test_ctrl_c_stops_the_reply_and_the_chat_goes_on(tmp_path: Path) -> None:
    with at_a_terminal() as person:
        person.wait_for("> ")
        person.type("hello you\n")
        person.wait_for("hello you\r\nhello you\r\n[2 tokens")
        person.wait_for("> ")
        person.type("forever\n")
        person.wait_for("forever forever forever")
        person.type("\x03")
        person.wait_for(" of 2,048, stopped]\r\n> ")
        person.type(f"/save {tmp_path}/talk\n")
        person.wait_for("The conversation is in")
        person.wait_for("> ")
        person.type("refuse\n")
        person.wait_for("too long (/clear starts a new conversation)\r\n> ")
        person.type("still here\n")
        person.wait_for("still here\r\nstill here\r\n")
        person.wait_for("> ")
        person.type("/exit\n")
        person.wait_for("left")
    reply = json.loads((tmp_path / "talk").read_text())[-1]
    assert reply["role"] == "assistant"
    assert reply["content"].startswith("forever forever forever")


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


def test_lines_are_kept_for_the_next_time(tmp_path: Path) -> None:
    path = tmp_path / "state" / "trioserve" / "chat_history"
    kept = {"TRIOSERVE_HISTORY": "", "XDG_STATE_HOME": str(tmp_path / "state")}
    with at_a_terminal(**kept) as person:
        person.wait_for("> ")
        person.type('"""first\n')
        person.wait_for(". ")
        person.type('second"""\n')
        person.wait_for("[2 tokens")
        person.wait_for("> ")
        person.type("\x10\n")  # Ctrl-P: the line before
        person.wait_for("[2 tokens")
        person.wait_for("> ")
        person.type("\x04")
        person.wait_for("left")
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        '"""first\nsecond"""',
        '"""first\nsecond"""',
    ]
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    with at_a_terminal(**kept) as person:
        person.wait_for("> ")
        person.type("\x10\x10\n")
        person.wait_for("[2 tokens")
        person.wait_for("> ")
        person.type("/exit\n")
        person.wait_for("left")
    assert json.loads(path.read_text().splitlines()[2]) == '"""first\nsecond"""'


def test_what_is_pasted_with_line_breaks_is_one_message() -> None:
    with at_a_terminal(TERM="xterm") as person:
        person.wait_for("\x1b[?2004h> ")
        person.type("\x1b[200~one\ntwo\nthree\x1b[201~\n")
        person.wait_for("[3 tokens")
        person.wait_for("\x1b[?2004h> ")
        person.type("\x03")
        person.wait_for("Ctrl-C again")
        person.type("\x03")
        person.wait_for("\x1b[?2004l")
        person.wait_for("left")
