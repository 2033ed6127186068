"""What the documentation asks a server, it asks one here: each ``curl``, and each program.

They run as they stand, but for the server's address, which is a free port here, and for folders of
adapters and weights that a reader has of their own.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from tests.doc_blocks import ROOT, Block, Command, blocks, commands_of, matches
from tests.test_doc_blocks import SESSION_LANGUAGES
from tests.test_docs import SERVER, expected_programs, run_program

ADMIN_KEY = "an-admins"
WITH_TLS = SERVER.replace("http:", "https:").replace("127.0.0.1", "localhost")


@attrs.frozen
class Place:
    """A folder to run in, and what to write instead of what the pages say."""

    folder: Path
    instead: dict[str, str]

    def here(self, text: str) -> str:
        """``text`` with all of that replaced."""
        for written, real in self.instead.items():
            text = text.replace(written, real)
        return text

    def run(self, command: Command) -> subprocess.CompletedProcess[str]:
        """Run a command line in bash."""
        return subprocess.run(
            ["bash", "-o", "pipefail", "-c", self.here(command.line)],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=self.folder,
            env={**os.environ, "ADMIN_KEY": ADMIN_KEY},
        )


@contextlib.contextmanager
def serving(folder: Path, *options: str) -> Iterator[str]:
    """A server, for as long as the block lasts, and its URL."""
    command = [sys.executable, "-m", "trioserve", "serve", "smollm2-135m", "--port", "0", *options]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


def program_on(page: str, holding: str) -> str:
    """The program of a page that has some text in it."""
    (text,) = [b.text for b in blocks("python") if b.page == page and holding in b.text]
    return text


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A server with what the pages speak of: adapters, a logits processor, an admin key."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "no_repeats.py").write_text(program_on("logits-processors", "NoRepeatNgram"))
    names: dict[str, object] = {"__name__": "lora"}
    exec(program_on("lora", "write_adapter").replace("trio.run(main)", ""), names)
    for name in ("pirate", "poet", "bard"):
        names["write_adapter"](folder / name, strength=0.1)  # type: ignore[operator]
    options = ["--logits-processors", "no_repeats:NoRepeatNgram", "--admin-api-key", ADMIN_KEY]
    for name in ("pirate", "poet"):
        options += ["--lora-modules", f"{name}={folder / name}"]
    with serving(folder, *options) as url:
        instead = {
            SERVER: url,
            SERVER.replace("127.0.0.1", "localhost"): url,
            "/adapters/": f"{folder}/",
            "/checkpoints/1200": "smollm2-135m",
        }
        yield Place(folder, instead)


def asking(*programs: str) -> list[tuple[Block, Command]]:
    """The command lines that begin with one of ``programs``, with their blocks."""
    return [
        (block, command)
        for block in blocks(*SESSION_LANGUAGES)
        for command in commands_of(block)
        if command.line.split()[0] in programs
    ]


PLAIN = [(block, command) for block, command in asking("curl") if WITH_TLS not in command.line]


@pytest.mark.parametrize(("block", "command"), PLAIN, ids=lambda part: str(part)[:40])
def test_a_command_gets_the_answer_that_is_shown(
    place: Place, block: Block, command: Command
) -> None:
    done = place.run(command)
    assert done.returncode == 0, done.stderr
    assert '"error"' not in done.stdout
    if command.output:
        assert matches(place.here(command.output), done.stdout), done.stdout
    else:
        assert done.stdout


@pytest.mark.parametrize(("block", "texts"), expected_programs(asking=True), ids=str)
def test_a_program_that_asks_runs_as_it_stands(
    place: Place, block: Block, texts: tuple[str, ...], tmp_path: Path
) -> None:
    printed = run_program(place.here(block.text), tmp_path)
    for text in texts:
        assert text in printed


def test_tls_with_a_certificate_of_ones_own(tmp_path: Path) -> None:
    (make,) = [command for _, command in asking("openssl")]
    (ask,) = [command for _, command in asking("curl") if WITH_TLS in command.line]
    assert Place(tmp_path, {}).run(make).returncode == 0
    files = ("--ssl-certfile", f"{tmp_path}/server.crt", "--ssl-keyfile", f"{tmp_path}/server.key")
    with serving(tmp_path, "--mock-worker", "1ms", *files) as url:
        url = url.replace("127.0.0.1", "localhost")
        done = Place(tmp_path, {WITH_TLS: url}).run(ask)
    assert done.stdout == '{"status":"ok"}', done.stderr
