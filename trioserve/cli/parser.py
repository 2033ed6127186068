"""The command line's grammar: the commands, their flags, and what is said of a line without sense.

The flags are made from :mod:`trioserve.config` and its like, so an option is defined once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import attrs

from trioserve.cli.bench_options import BENCH_GROUPS, BenchOptions
from trioserve.cli.equivalents import explained, told, without_foreign
from trioserve.cli.mock import add_mock_flag
from trioserve.cli.remote_options import DEFAULT_URL, RemoteOptions
from trioserve.cli.top.options import TOP_GROUPS, TopOptions
from trioserve.config import GROUPS, EngineConfig, ServerConfig
from trioserve.config.options import Option, options_of
from trioserve.protocol.version import __version__

__all__ = ["DEFAULT_MODEL", "SAMPLING_OPTIONS", "build_parsers", "parse"]

DEFAULT_MODEL = "smollm2-135m"

_COMMANDS_WITH_MODELS = ("serve", "chat", "generate")

_MODEL_HELP = (
    "a known name (smollm2-135m), a folder, a GGUF file or a Hugging Face Hub id "
    f"(default: $TRIOSERVE_MODEL, else {DEFAULT_MODEL})"
)
_EPILOG = (
    "Every option is also an environment variable: TRIOSERVE_MAX_NUM_SEQS for --max-num-seqs, "
    "commas between several values. A flag wins over its variable."
)
_SIGNALS_EPILOG = (
    " Ctrl-C or SIGTERM lets running requests finish, for --shutdown-timeout seconds at most; "
    "a second one ends the server at once. The exit code is 0 if all have finished, 3 if some were "
    "cut off, 1 if the server failed, and 128 + the signal's number if a signal ended it at once."
)
_BENCH_EPILOG = (
    "By itself it asks a server at http://127.0.0.1:8000 for 128 tokens at a time over 8 streams. "
    "A sweep: --concurrency 1 8 32 or --request-rate 1 2 4, with --plots FOLDER or --html FILE. "
    "Figures are those of vLLM's tool; docs/benchmarking.md defines them. The exit code is 1 if a "
    "request failed."
)


def _sampling_option(name: str, kind: type, help: str, **more: Any) -> Option:
    return Option(name=name, kind=kind, default=None, help=help, group="sampling", **more)


SAMPLING_OPTIONS = (
    _sampling_option("max_tokens", int, "most tokens to generate (default: --max-tokens-default)"),
    _sampling_option("min_tokens", int, "fewest tokens to generate"),
    _sampling_option("temperature", float, "0 always takes the most probable token"),
    _sampling_option("top_k", int, "sample from the N most probable tokens"),
    _sampling_option("top_p", float, "sample from the most probable tokens that make up X"),
    _sampling_option("min_p", float, "leave out tokens below X times the most probable one's"),
    _sampling_option("repetition_penalty", float, "above 1 discourages what occurred before"),
    _sampling_option("frequency_penalty", float, "discourage tokens by how often they occurred"),
    _sampling_option("presence_penalty", float, "discourage tokens that occurred at all"),
    _sampling_option("stop", str, "end before this text; may be given again", repeatable=True),
    _sampling_option("ignore_eos", bool, "go on past the model's end of text"),
)
"""The fields of SamplingParams that are flags; without a flag the model's own default holds."""


class _Parser(argparse.ArgumentParser):
    """A parser that says what is wrong in short, and what does the same as unknown options."""

    def error(self, message: str) -> NoReturn:
        end = "see" if message.endswith("\n") else "; see"
        self.exit(2, f"{self.prog}: {message}{end} {self.prog} --help\n")

    def without_foreign(self, arguments: Sequence[str], *, has_tables: bool) -> list[str]:
        """Return the arguments without options that change nothing; exit with others'."""
        flags = [flag for action in self._actions for flag in action.option_strings]
        left, foreign = without_foreign(arguments, flags, has_tables=has_tables)
        unknown = [each for each in foreign if not each.is_taken]
        if unknown:
            self.error(explained(unknown, flags, has_tables=has_tables))
        for each in foreign:
            print(f"{self.prog}: {told(each)}", file=sys.stderr)
        return left


def _add_option(group: argparse._ArgumentGroup, option: Option, *, lists: bool = False) -> None:
    """The flag of ``option``; with ``lists`` a repeatable one takes several values at once, too."""
    # Texts are converted later, with those of the environment, so both are refused alike.
    default = f" (default: {option.default_text})" if option.default_text is not None else ""
    common: dict[str, Any] = {
        "dest": option.name,
        "default": argparse.SUPPRESS,
        "help": (option.help + default).replace("%", "%%"),
    }
    if option.kind is bool:
        group.add_argument(option.flag, action=argparse.BooleanOptionalAction, **common)
    elif option.repeatable and lists:
        group.add_argument(
            option.flag, action="extend", nargs="+", metavar=option.value_name, **common
        )
    else:
        action = "append" if option.repeatable else "store"
        group.add_argument(option.flag, action=action, metavar=option.value_name, **common)


def _add_options(
    parser: argparse.ArgumentParser,
    *classes: type[attrs.AttrsInstance],
    groups: Mapping[str, str] = GROUPS,
    lists: bool = False,
) -> None:
    options = [option for cls in classes for option in options_of(cls)]
    for name, title in groups.items():
        members = [option for option in options if option.group == name]
        if members:
            group = parser.add_argument_group(title)
            for option in members:
                _add_option(group, option, lists=lists)


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Sampling (defaults: the model's own)")
    for option in SAMPLING_OPTIONS:
        _add_option(group, option)


def build_parsers() -> tuple[_Parser, dict[str, _Parser]]:
    """The parser that lists the commands, and the commands' own by name."""
    parser = _Parser(
        prog="trioserve",
        description="Serve large language models, or use one here.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"trioserve {__version__}")
    group = parser.add_subparsers(metavar="COMMAND", parser_class=_Parser, title="commands")
    commands: dict[str, _Parser] = {}

    def add(name: str, help: str, usage: str, epilog: str | None = None) -> _Parser:
        command = group.add_parser(
            name,
            help=help,
            description=help[0].upper() + help[1:] + ".",
            usage=f"trioserve {name} {usage}",
            epilog=epilog,
            allow_abbrev=False,
        )
        command.set_defaults(command=name)
        commands[name] = command
        return command

    serve = add("serve", "serve a model over HTTP", "[MODEL] [options]", _EPILOG + _SIGNALS_EPILOG)
    serve.add_argument("model", metavar="MODEL", nargs="?", help=_MODEL_HELP)
    _add_options(serve, EngineConfig, ServerConfig)
    add_mock_flag(serve)

    chat = add("chat", "talk to a model in the terminal", "[MODEL] [options]", _EPILOG)
    chat.add_argument("model", metavar="MODEL", nargs="?", help=_MODEL_HELP)
    chat.add_argument("--system", metavar="TEXT", help="what the model is told before the chat")
    chat.add_argument(
        "--history",
        metavar="FILE",
        help="keep what is written at the prompt in FILE, or nowhere (off) "
        "(default: $TRIOSERVE_HISTORY, else ~/.local/state/trioserve/chat_history)",
    )
    chat.add_argument(
        "--url",
        metavar="URL",
        help="talk to this OpenAI-compatible server in place of a model that is loaded here; MODEL "
        "is a name of its own (default: the first that it lists)",
    )
    _add_sampling_options(chat)
    _add_options(chat, RemoteOptions, groups={"target": "With --url"})
    _add_options(chat, EngineConfig)

    generate = add("generate", "continue a text", "MODEL [PROMPT] [options]", _EPILOG)
    generate.add_argument("model", metavar="MODEL", help=_MODEL_HELP.partition(" (default")[0])
    generate.add_argument("prompt", metavar="PROMPT", nargs="?", help="default: read from stdin")
    _add_sampling_options(generate)
    _add_options(generate, EngineConfig)

    bench = add("bench", "measure a server under load", "[URL] [options]", _BENCH_EPILOG)
    bench.add_argument(
        "url",
        metavar="URL",
        nargs="?",
        help=f"an OpenAI-compatible server, /v1 at its end or not (default: {DEFAULT_URL})",
    )
    _add_options(bench, BenchOptions, groups=BENCH_GROUPS, lists=True)
    add_mock_flag(bench)

    top = add("top", "watch a server: rates, latencies, pages, requests, tasks", "[URL] [options]")
    top.add_argument(
        "url", metavar="URL", nargs="?", help=f"a trioserve server (default: {DEFAULT_URL})"
    )
    top.add_argument("--once", action="store_true", help="print one picture and leave")
    top.add_argument("--json", action="store_true", help="print pictures as lines of JSON")
    _add_options(top, TopOptions, groups=TOP_GROUPS)

    doctor = add("doctor", "show what this machine has, and what is missing", "[--json]")
    doctor.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser, commands


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line. Exits with code 2 and one line where it makes no sense.

    The namespace holds ``command`` and, as text, the options that were given.
    """
    given = sys.argv[1:] if argv is None else list(argv)
    parser, commands = build_parsers()
    if not given:
        parser.print_help(sys.stderr)
        parser.exit(2)
    if given[0] not in commands:
        parser.parse_args(given)
        parser.error(f"no command in {' '.join(given)!r}")
    # Intermixed, so that MODEL and PROMPT may stand before, between and after the flags.
    command = commands[given[0]]
    words = command.without_foreign(given[1:], has_tables=given[0] in _COMMANDS_WITH_MODELS)
    arguments, unknown = command.parse_known_intermixed_args(words)
    if unknown:
        command.error(f"unknown: {' '.join(unknown)}")
    return arguments
