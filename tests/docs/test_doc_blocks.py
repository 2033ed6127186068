"""Every code block of the documentation is covered: each is run, or checked by what would run it.

``tests/docs/test_docs.py`` runs the programs, ``tests/docs/test_server.py`` what asks a server.
Here the rest is held to what it is for: a command line to its parser, a file to its format.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from tests.docs.test_docs import ELSEWHERE, EXPECTED
from tests.support.doc_blocks import ROOT, Block, Command, blocks, commands_of, matches
from trioserve.cli import flags
from trioserve.cli.mock import mock_steps
from trioserve.cli.parser import parse
from trioserve.cli.route import upstreams_of
from trioserve.cli.usage import UsageError

SESSION_LANGUAGES = ("console", "bash")
DIRECTIVES = re.compile(r"\{[a-z-]+\}( .*)?")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def check_trioserve(words: Sequence[str]) -> None:
    """``trioserve …``: its options exist, and their values are allowed."""
    if any(word.partition("=")[0] == "--help" for word in words):
        with pytest.raises(SystemExit) as left:
            parse(words)
        assert left.value.code == 0
        return
    arguments = vars(parse(words))
    checks: dict[str, Callable[[], object]] = {
        "serve": lambda: (flags.server_config(arguments, {}), mock_steps(arguments)),
        "route": lambda: upstreams_of(flags.router_config(arguments, {})),
        "chat": lambda: (
            flags.engine_config(arguments, {}),
            flags.sampling_fields(arguments),
            flags.remote_options(arguments),
        ),
        "generate": lambda: (flags.engine_config(arguments, {}), flags.sampling_fields(arguments)),
        "bench": lambda: flags.embedded_config(flags.bench_options(arguments), {}),
        "top": lambda: flags.top_options(arguments),
        "doctor": lambda: None,
        "worker": lambda: flags.worker_options(arguments, {}),
        "front-end": lambda: flags.front_end_options(arguments, {}),
        "worker-certificates": lambda: None,
    }
    checks[arguments["command"]]()


def check_nox(words: Sequence[str]) -> None:
    """``nox -s a b -- …``: there are such sessions, and what follows is what they take."""
    names, _, rest = _split(words, "--")
    if names != ["--list"]:
        assert names[0] == "-s"
        sessions = set(re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(), re.M))
        assert set(names[1:]) <= sessions
    if "serve" in names:
        check_trioserve(["serve", *rest])
    elif rest:
        options = [word for word in rest if word.startswith("--")]
        assert all(f'"{option}"' in _sources("bench", "trioserve/testing") for option in options)


def check_module(words: Sequence[str]) -> None:
    """``python -m module …``: there is one, with such options."""
    module, *rest = words
    if module == "nox":
        check_nox(rest)
    elif module == "pip":
        check_pip(rest)
    elif module == "trioserve":
        check_trioserve(rest)
    else:
        assert find_spec(module) is not None
        known = _sources(module.split(".")[0], "trioserve/testing")
        for option in (word for word in rest if word.startswith("--")):
            # Scripts of bench/ name an option by its default: rounds=3, or "rounds": 3.
            name = option.removeprefix("--").replace("-", "_")
            assert re.search(rf'"{option}"|"{name}": |\b{name}=', known), words


def check_python(words: Sequence[str]) -> None:
    """``python -m …`` or ``python file.py``."""
    if words[0] == "-m":
        check_module(words[1:])
    else:
        # One of the project, or what the reader was told to save.
        told = any(f"`{words[0]}`:" in page.read_text() for page in (ROOT / "docs").glob("*.md"))
        assert told or (ROOT / words[0]).is_file()


def check_pip(words: Sequence[str]) -> None:
    """``pip install …``: requirements that can be read, and extras that this project has."""
    assert words[0] == "install"
    for word in words[1:]:
        if word.startswith("-") or word == "constraints.txt" or word.endswith(".whl"):
            continue
        # The project is on no registry: it is installed from a clone.
        requirement = Requirement(re.sub(r"^\.", "clone", word))
        assert requirement.name != "trioserve"
        if requirement.name == "clone":
            assert requirement.extras <= set(PROJECT["project"]["optional-dependencies"])


def _split(words: Sequence[str], at: str) -> tuple[list[str], str, list[str]]:
    place = list(words).index(at) if at in words else len(words)
    return list(words[:place]), at, list(words[place + 1 :])


def _sources(*folders: str) -> str:
    return "".join(path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py"))


def check_podman(words: Sequence[str]) -> None:
    """Files that are there, and behind the image's name what ``trioserve serve`` takes."""
    for option, value in itertools.pairwise(words):
        if option == "--file":
            assert (ROOT / value).is_file()
        elif option == "--env":
            assert not flags.unknown_variable_lines({value.split("=")[0]: "x"})
    if words[0] == "run":
        check_trioserve(["serve", *words[list(words).index("trioserve") + 1 :]])


def check_unit(words: Sequence[str]) -> None:
    """Check that the unit is the project's."""
    assert Path(words[-1]).stem == "trioserve"
    assert (ROOT / "docs" / "deploy" / "trioserve.service").is_file()


def run_elsewhere(_words: Sequence[str]) -> None:
    """Check that ``tests/docs/test_server.py`` runs the block."""


PROGRAMS: dict[str, Callable[[Sequence[str]], None]] = {
    "trioserve": check_trioserve,
    "python": check_python,
    "python3": check_python,
    "nox": check_nox,
    "pip": check_pip,
    "curl": run_elsewhere,
    "openssl": run_elsewhere,
    "podman": check_podman,
    "systemctl": check_unit,
    "systemd-analyze": check_unit,
}
"""Checks of programs' arguments, by the program's name."""
HARMLESS = {".", "cat", "cd", "cp", "echo", "git", "grep", "head", "jq", "kill", "mkdir", "printf"}
"""Programs about which nothing can be wrong here."""
OTHERS = {"lm_eval": "clients/test_lm_eval.py"}
"""Programs of others, and the tests that run them."""


def programs_of(command: Command) -> list[list[str]]:
    """Return the programs of a command line with their arguments."""
    line = re.sub(r"\d?>+ *[\w/.]+", "", command.line)
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set("|&;"):
            found.append([])
        elif not found[-1] and re.fullmatch(r"[A-Z_]+=.*", word):
            assert not flags.unknown_variable_lines({word.split("=")[0]: "x"}), word
        else:
            found[-1].append(word)
    return [words for words in found if words]


def check_session(block: Block) -> None:
    """Check every program of a session."""
    for command in commands_of(block):
        for program, *words in programs_of(command):
            name = program.split("/")[-1]
            if name in OTHERS:
                assert (ROOT / "tests" / OTHERS[name]).exists()
            elif name not in HARMLESS:
                assert name in PROGRAMS, f"{block}: nothing checks {program}"
                PROGRAMS[name](words)


def check_json(block: Block) -> None:
    """Check that it can be parsed."""
    json.loads(block.text)


def check_yaml(block: Block) -> None:
    """Check that it can be parsed and isn't empty."""
    assert yaml.safe_load(block.text)


def check_program(block: Block) -> None:
    """Check that ``tests/docs/test_docs.py`` runs it, or names the test that does."""
    if block.page in ELSEWHERE:
        for test in ELSEWHERE[block.page]:
            assert f'"{block.page}.md"' in (ROOT / "tests" / test).read_text()
    else:
        assert block.number < len(EXPECTED[block.page]), f"{block}: who runs it?"


CHECKS: dict[str, Callable[[Block], None]] = {
    **dict.fromkeys(SESSION_LANGUAGES, check_session),
    "json": check_json,
    "yaml": check_yaml,
    "python": check_program,
    "text": lambda _: None,  # pictures, and what is printed
    # Files of the repository, which docs/_ext/tables.py copies and other tests run.
    "nginx": lambda _: None,
    "py": lambda _: None,
}


@pytest.mark.parametrize("block", [b for b in blocks() if not b.language.startswith("{")], ids=str)
def test_a_block_is_what_its_language_says(block: Block) -> None:
    assert block.language in CHECKS, f"{block}: nothing checks blocks in {block.language}"
    CHECKS[block.language](block)


def test_other_blocks_are_directives() -> None:
    others = [block for block in blocks() if block.language not in CHECKS]
    assert others
    for block in others:
        assert DIRECTIVES.fullmatch(block.language), block


def test_every_program_that_is_expected_is_there() -> None:
    numbers = {(block.page, block.number) for block in blocks("python")}
    for page, parts in EXPECTED.items():
        for number in range(len(parts)):
            assert (page, number) in numbers


@pytest.mark.parametrize(
    "line",
    [
        "trioserve serve --max-num-seq 3",
        "trioserve serve --port many",
        "trioserve serve --help=max-num-seq",
        "TRIOSERVE_MAX_NUM_SEQ=3 trioserve serve",
        "python -m nox -s serves",
        "python -m bench.nothing",
        "pip install '.[nothing]'",
        "pip install 'trioserve[otel]'",
        "unheard-of --option",
        "podman run trioserve --max-num-seq 3",
        "python docs/examples/none.py",
        "curl http://127.0.0.1:8000/health | trioserve generate",
    ],
)
def test_a_command_that_is_wrong_is_found(line: str) -> None:
    with pytest.raises((AssertionError, SystemExit, UsageError)):
        check_session(Block("page", "console", 0, f"$ {line}\n"))


def test_commands_and_their_output() -> None:
    text = "$ one \\\n  two\nfirst\nsecond\n$ three 'a\nb'\n"
    assert commands_of(Block("page", "console", 0, text)) == [
        Command("one \\\n  two", "first\nsecond\n"),
        Command("three 'a\nb'"),
    ]
    assert [each.line for each in commands_of(Block("page", "bash", 0, "a\nb\n"))] == ["a", "b"]


def test_what_a_page_shows_of_an_output() -> None:
    assert matches('{"a":3, ...', '{"a":4,"b":5}')
    assert matches("took 3.5 s … end", "took 17 s and\nwent on to the end\n")
    assert not matches("took 3.5 s", "took 3.5 m")
    assert not matches("one two", "one two three")
