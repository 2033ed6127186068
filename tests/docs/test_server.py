"""Requests of the documentation, sent to a real server: each ``curl``, and each program.

They run as they stand, but for the server's address, which is a free port here, and for folders of
adapters and weights that a reader has of their own.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from tests.docs.test_doc_blocks import SESSION_LANGUAGES
from tests.docs.test_docs import SERVER, expected_programs, run_program
from tests.docs.test_examples import ASK_A_SERVER
from tests.support.doc_blocks import (
    ROOT,
    Block,
    Command,
    blocks,
    commands_of,
    matches,
    program_on,
    write_adapters,
)

ADMIN_KEY = "an-admins"
WITH_TLS = SERVER.replace("http:", "https:").replace("127.0.0.1", "localhost")


@attrs.frozen
class Place:
    """A folder to run in, and what to write instead of what the pages say."""

    folder: Path
    instead: dict[str, str]
    url: str = ""

    def here(self, text: str) -> str:
        """``text`` with all of that replaced."""
        for written, real in self.instead.items():
            text = text.replace(written, real)
        return text

    def run(self, command: Command) -> str:
        """Return what a command line prints in bash. One whose output has no end is cut off."""
        with subprocess.Popen(
            ["timeout", "60", "bash", "-o", "pipefail", "-c", self.here(command.line)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env={**os.environ, "ADMIN_KEY": ADMIN_KEY},
            start_new_session=True,
        ) as process:
            assert process.stdout is not None
            shown, printed = self.here(command.output), ""
            endless = shown.rstrip().endswith(("...", "…"))
            for line in process.stdout:
                printed += line
                if endless and matches(shown, printed):
                    os.killpg(process.pid, signal.SIGKILL)
                    return printed
        hung_up = 28 if "--max-time" in command.line else 0
        assert process.returncode in (0, hung_up), printed
        return printed


@contextlib.contextmanager
def serving(folder: Path, *options: str) -> Iterator[str]:
    """Open a server, for as long as the block lasts, and its URL."""
    command = [sys.executable, "-m", "trioserve", "serve", "smollm2-135m", "--port", "0", *options]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A server with what the pages speak of: adapters, a logits processor, an admin key."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "no_repeats.py").write_text(program_on("logits-processors", "class NoRepeatNgram"))
    adapters = write_adapters(folder, pirate=0.1, poet=0.1, bard=0.1)
    options = ["--logits-processors", "no_repeats:NoRepeatNgram", "--admin-api-key", ADMIN_KEY]
    # A small model may ramble to the end of its context: that is near.
    options += ["--seed", "7", "--max-model-len", "1024"]
    for name in ("pirate", "poet"):
        options += ["--lora-modules", f"{name}={adapters[name]}"]
    with serving(folder, *options) as url:
        instead = {
            SERVER: url,
            SERVER.replace("127.0.0.1", "localhost"): url,
            "/adapters/": f"{folder}/",
            "/checkpoints/1200": "smollm2-135m",
        }
        yield Place(folder, instead, url)


def asking(*programs: str) -> list[tuple[Block, Command]]:
    """Return the command lines that begin with one of ``programs``, with their blocks."""
    return [
        (block, command)
        for block in blocks(*SESSION_LANGUAGES)
        for command in commands_of(block)
        if command.line.split()[0] in programs
    ]


PLAIN = [(block, command) for block, command in asking("curl") if SERVER in command.line]


@pytest.mark.parametrize(("block", "command"), PLAIN, ids=lambda part: str(part)[:40])
def test_a_command_gets_the_answer_that_is_shown(
    place: Place, block: Block, command: Command
) -> None:
    printed = place.run(command)
    assert '"error"' not in printed
    if command.output:
        assert matches(place.here(command.output), printed), printed
    else:
        assert printed or "--max-time" in command.line


@pytest.mark.parametrize(("block", "texts"), expected_programs(asking=True), ids=str)
def test_a_program_that_asks_runs_as_it_stands(
    place: Place, block: Block, texts: tuple[str, ...], tmp_path: Path
) -> None:
    printed = run_program(place.here(block.text), tmp_path)
    assert printed
    for text in texts:
        assert text in printed


def commands_in_the_terminal() -> list[str]:
    """Return those of their page that end by themselves."""
    return [
        command.line
        for block, command in asking("trioserve", "printf", "echo")
        if block.page == "terminal"
        if re.search(r"generate |top --once$|\| trioserve chat", command.line)
    ]


@pytest.mark.parametrize("line", commands_in_the_terminal())
def test_a_command_in_the_terminal(place: Place, line: str) -> None:
    line = line.replace("trioserve top", f"trioserve top {place.url}")
    line = line.replace("trioserve", f"{sys.executable} -m trioserve", 1)
    # A small model may ramble to the end of its context: that is near.
    assert place.run(Command(f"export TRIOSERVE_MAX_MODEL_LEN=256; {line}")).strip()


def test_the_page_on_the_terminal_has_such_commands() -> None:
    assert len(commands_in_the_terminal()) == 4


def test_other_commands_ask_what_other_tests_have() -> None:
    """Yield the command lines that other tests cover: a certificate, and the web app."""
    lines = [command.line for _, command in asking("curl") if SERVER not in command.line]
    assert all(WITH_TLS in line or "http://127.0.0.1:8001/" in line for line in lines)


def test_an_agent_with_tools(place: Place) -> None:
    lines = run_example("tool_loop", place).splitlines()
    assert re.fullmatch(r'weather \{"city": ?"(Paris|Rome)"\} -> .* degrees\.', lines[0])
    assert "".join(lines[1:])


def test_a_client_that_leaves(place: Place) -> None:
    printed = run_example("disconnect", place)
    assert re.fullmatch(
        r"while it streams: 1 runs\nnoticed within \d\.\d{3} s, aborted: 1\n"
        r"tokens computed since then: 0\n",
        printed,
    ), printed


def run_example(name: str, place: Place) -> str:
    """Return what a program of examples/ prints that asks the server."""
    assert name in ASK_A_SERVER
    return run_program(
        (ROOT / "docs" / "examples" / f"{name}.py").read_text(), place.folder, place.url
    )


def test_tls_with_a_certificate_of_ones_own(tmp_path: Path) -> None:
    (make,) = [command for _, command in asking("openssl")]
    (ask,) = [command for _, command in asking("curl") if WITH_TLS in command.line]
    Place(tmp_path, {}).run(make)
    files = ("--ssl-certfile", f"{tmp_path}/server.crt", "--ssl-keyfile", f"{tmp_path}/server.key")
    with serving(tmp_path, "--mock-worker", "1ms", *files) as url:
        url = url.replace("127.0.0.1", "localhost")
        assert Place(tmp_path, {WITH_TLS: url}).run(ask) == '{"status":"ok"}'
