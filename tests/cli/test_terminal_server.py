"""``trioserve chat --url`` and ``trioserve top`` at a pseudo-terminal, over a real server."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.model_server import ROOT, Server, serving
from tests.support.pseudo_terminals import Person, person_at

KEY = {"OPENAI_API_KEY": "secret", "TRIOSERVE_HISTORY": "off"}
LEFT = "\x1b[?1049l"
"""The sequence that brings back a terminal's earlier screen."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One whose model says a fixed text, a token every 20 ms."""
    with serving("--mock-worker", "20ms") as running:
        yield running


@contextlib.contextmanager
def running(*argv: str, **environment: str) -> Iterator[Person]:
    command = [sys.executable, "-m", "trioserve", *argv]
    with person_at(command, **{"TERM": "xterm", **KEY, **environment}) as person:
        yield person


def print_top(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``trioserve top`` in a pipe."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80", **environment}
    command = [sys.executable, "-m", "trioserve", "top", *argv]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=environment, check=False
    )


def frames(seen: str) -> list[str]:
    """Return what was on the screen, one after the other, without what gives it color."""
    return [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", frame) for frame in seen.split("\x1b[H")]


def test_a_chat_with_a_server(server: Server) -> None:
    with running("chat", "--url", server.url, "--max-tokens", "3000", TERM="dumb") as person:
        person.wait_for("smollm2-135m, 8,192 tokens of context.")
        person.wait_for("> ")
        person.type("/set max_tokens 4\n")
        person.wait_for("> ")
        person.type("hello\n")
        person.wait_for("\r\n[4 tokens, ")
        assert "tokens/s, first after" in person.wait_for(" of 8,192, ended by length]")
        person.wait_for("> ")
        person.type("/set max_tokens 3000\n")
        person.wait_for("> ")
        person.type("go on\n")
        person.wait_for("lighthouse")
        person.type("\x03")
        person.wait_for(", stopped]")
        server.wait_until_idle()
        person.wait_for("> ")
        person.type("/set max_tokens 9000\n")
        person.wait_for("> ")
        person.type("too much\n")
        person.wait_for(f"{server.url} refuses with 400: ")
        person.wait_for("(/clear starts a new conversation)")
        person.wait_for("> ")
        person.type("\x04")
        assert person.wait() == 0


@pytest.mark.parametrize("command", ["chat --url", "top"])
def test_a_server_that_can_not_be_asked_is_a_line(server: Server, command: str) -> None:
    with running(*command.split(), server.url, OPENAI_API_KEY="wrong") as person:
        assert person.wait() == 1
        person.wait_for(f"trioserve: {server.url} refuses with 401: give the right --api-key\r\n")


def test_top_shows_what_the_server_does(server: Server) -> None:
    with running("chat", "--url", server.url, "--max-tokens", "8000", TERM="dumb") as talker:
        talker.wait_for("> ")
        talker.type("hello\n")
        talker.wait_for("lighthouse")
        stale = {"COLUMNS": "80", "LINES": "24"}  # as the window was when a shell began
        with running("top", server.url, "--interval", "0.2", **stale) as person:
            person.wait_for("\x1b[?1049h")
            person.wait_for("chatcmpl-")
            person.wait_for("decode")
            person.wait_for(" tok/s")
            person.type("t")
            person.wait_for("Schedulers.run")
            person.type("\x1b[B")
            person.wait_for(" 2-15 of ")
            person.resize(60, 12)
            last = frames(person.wait_for(" 2-7 of "))[-1].split("\r\n")
            assert len(last) == 12
            assert {len(line) for line in last[:-1]} == {60}
            person.type("p")
            person.wait_for("PAUSED")
            person.type("q")
            assert person.wait() == 0
            person.wait_for(LEFT)
        talker.type("\x03")
        talker.wait_for("stopped]")
        talker.wait_for("> ")
        talker.type("\x04")
        assert talker.wait() == 0


def test_top_stops_and_goes_on(server: Server) -> None:
    with running("top", server.url, "--interval", "0.2", NO_COLOR="1") as person:
        assert "\x1b[3" not in person.wait_for("worker")
        person.type("\x1a")
        person.wait_for(LEFT)
        deadline = time.monotonic() + 60
        while "State:\tT" not in Path(f"/proc/{person.process.pid}/status").read_text():
            assert time.monotonic() < deadline
        person.seen = ""
        person.process.send_signal(signal.SIGCONT)
        person.wait_for("worker")
        person.process.send_signal(signal.SIGTERM)
        assert person.wait() == 128 + signal.SIGTERM
        person.wait_for(LEFT)


def test_top_tells_when_the_server_goes() -> None:
    with serving("--mock-worker", "20ms") as server:
        with running("top", server.url, "--interval", "0.2") as person:
            person.wait_for("worker")
            server.process.kill()
            person.wait_for("lost, trying again: ")
            person.type("q")
            assert person.wait() == 0


def test_top_prints_for_whoever_is_no_terminal(server: Server) -> None:
    for option in ((), ("--once",)):
        done = print_top(server.url, *option, "--api-key", "secret", "--interval", "0.1")
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert lines[0].startswith(" smollm2-135m  ok  up ")
        assert "REQUEST " in lines[8]
        assert "\x1b" not in done.stdout
    done = print_top(server.url, "--once", "--json", "--interval", "0.1", **KEY)
    assert json.loads(done.stdout)["health"] == "ok"
    nobody = "http://127.0.0.1:9"
    done = print_top(nobody)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"trioserve: {nobody} can't be reached: ")
    assert done.stderr.count("\n") == 1
