"""``--help``, ``--help=all`` and ``--help=NAME`` of every command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.doc_blocks import blocks, commands_of
from trioserve.cli.command_parser import CommandParser
from trioserve.cli.help import close_names, plain_name, topic_of
from trioserve.cli.parser import build_parsers, parse
from trioserve.config import GROUPS, EngineConfig, ServerConfig
from trioserve.config.options import options_of

DOCS = Path(__file__).parents[2] / "docs"
COMMANDS = build_parsers()[1]
LONG = [name for name, command in COMMANDS.items() if len(command.options) > 30]
SERVER_OPTIONS = [*options_of(EngineConfig), *options_of(ServerConfig)]
each_command = pytest.mark.parametrize("name", COMMANDS)


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as caught:
        parse(argv)
    assert caught.value.code == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"^  (--[\w-]+)", text, re.MULTILINE))


def flags_of(command: CommandParser) -> set[str]:
    return {action.option_strings[0] for action in command._actions if action.option_strings}


def test_serve_shows_the_common_options_in_their_groups(capsys: pytest.CaptureFixture[str]) -> None:
    common = {option.flag for option in SERVER_OPTIONS if option.common}
    assert 20 <= len(common) <= 28
    text = shown(capsys, "serve", "--help")
    assert flags_in(text) == common
    titles = re.findall(r"^(\w.*):$", text, re.MULTILINE)
    assert [title for title in titles if title in {group.title for group in GROUPS.values()}] == [
        group.title for group in GROUPS.values()
    ]


def test_long_lists_of_options_are_those_of_four_commands() -> None:
    assert LONG == ["serve", "chat", "generate", "bench"]


@pytest.mark.parametrize("name", LONG)
def test_short_help_begins_with_the_way_to_the_others(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(capsys, name, "--help")
    beginning = text[: text.index("positional arguments:")]
    assert f"--help=all shows all {len(COMMANDS[name].options)}," in " ".join(beginning.split())
    assert "--help=NAME" in beginning
    assert 20 <= len(flags_in(text)) <= 35
    assert flags_in(text) < flags_in(shown(capsys, name, "--help=all"))


@each_command
def test_help_all_names_every_flag(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, name, "--help=all")
    for action in COMMANDS[name]._actions:
        for flag in action.option_strings:
            assert flag in text


@each_command
def test_help_of_few_options_shows_them_all(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name not in LONG:
        assert shown(capsys, name, "--help") == shown(capsys, name, "--help=all")


@pytest.mark.parametrize(
    "name",
    ["max-num-seqs", "--max-num-seqs", "max_num_seqs", "TRIOSERVE_MAX_NUM_SEQS"],
)
def test_an_option_is_shown_in_full_by_any_of_its_names(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    option = next(option for option in SERVER_OPTIONS if option.name == "max_num_seqs")
    assert shown(capsys, "serve", f"--help={name}").splitlines() == [
        "--max-num-seqs N",
        "",
        f"  {option.help}",
        "",
        "  variable: TRIOSERVE_MAX_NUM_SEQS",
        "  value:    a whole number of at least 1",
        "  default:  256",
        '  docs:     docs/overload.md, "What to set"',
    ]


@each_command
def test_every_argument_has_a_topic_and_a_section_of_the_docs(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    command = COMMANDS[name]
    assert set(command.options) <= {action.dest for action in command._actions}
    for action in command._actions:
        text = shown(capsys, name, f"--help={action.dest}")
        found = re.search(r'docs: +docs/([\w-]+\.md), "(.+)"$', text, re.MULTILINE)
        assert found is not None, text
        path, heading = found.groups()
        page = (DOCS / path).read_text(encoding="utf-8")
        assert re.search(rf"^#+ {re.escape(heading)}$", page, re.MULTILINE), (action.dest, heading)


def test_the_page_about_options_shows_what_help_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    commands = [
        command
        for block in blocks("console")
        if block.page == "options"
        for command in commands_of(block)
        if "--help" in command.line and command.output
    ]
    assert commands
    for command in commands:
        assert shown(capsys, *command.line.split()[1:]) == command.output


def test_a_topic_has_choices_several_values_and_a_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    text = shown(capsys, "serve", "--help=dtype")
    assert "value:    one of auto, float32, bfloat16, float16\n" in text
    text = shown(capsys, "serve", "--help=api-key")
    assert "variable: TRIOSERVE_API_KEY, with commas between several values\n" in text
    text = shown(capsys, "serve", "--help=no-console")
    assert text.startswith("--console, --no-console\n")
    assert "default:  on\n" in text
    assert "variable: TRIOSERVE_MODEL\n" in shown(capsys, "serve", "--help=model")
    assert "variable:" not in shown(capsys, "bench", "--help=num-prompts")
    assert "value:" not in shown(capsys, "bench", "--help=records")


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("max-num-seq", ["--max-num-seqs"]),
        ("TRIOSERVE_MAX_NUM_SEQ", ["--max-num-seqs"]),
        ("cach", ["--enable-prefix-caching", "--prefix-cache-scope"]),
        ("zzzz", []),
        ("", []),
    ],
)
def test_a_wrong_name_is_one_line_with_the_close_ones(
    name: str, close: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["serve", f"--help={name}"])
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"trioserve serve: no option is named {name!r}")
    assert err.endswith("; see trioserve serve --help=all\n")
    assert err.count("\n") == 1
    for flag in close:
        assert flag in err
    if not name or name == "zzzz":
        assert "close to it" not in err


def test_a_variable_of_another_command_is_no_name_of_an_option() -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["bench", "--help=TRIOSERVE_NUM_PROMPTS"])
    assert caught.value.code == 2


def test_names_that_hold_the_word_come_before_those_that_look_like_it() -> None:
    known = ["--max-loras", "--enable-lora", "--port"]
    assert close_names("lora", known) == ["--max-loras", "--enable-lora"]
    assert close_names("prot", known) == ["--port"]


def test_a_name_is_looked_for_before_two_dashes_alone() -> None:
    assert topic_of(["--port", "1", "--help=a", "--help=b"]) == "a"
    assert topic_of(["--", "--help=a"]) is None
    assert topic_of(["--help"]) is None
    assert plain_name("--Max_Num-Seqs") == "max-num-seqs"


def test_help_without_a_name_takes_no_word_after_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "serve", "--help", "smollm2-135m") == shown(capsys, "serve", "-h")


@each_command
@pytest.mark.parametrize("columns", [40, 60, 200])
def test_help_fits_other_terminals(
    name: str,
    columns: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    texts = [shown(capsys, name, "--help"), shown(capsys, name, "--help=all")]
    texts += [shown(capsys, name, f"--help={each}") for each in COMMANDS[name].options]
    for line in "".join(texts).splitlines():
        assert len(line) <= columns or " " not in line.strip(), line
