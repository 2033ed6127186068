"""The command line's grammar: the commands and their flags.

The flags are made from the classes of options, so each option is defined once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import attrs

from trioserve.cli.bench_options import BENCH_GROUPS, BenchOptions
from trioserve.cli.command_parser import CommandParser
from trioserve.cli.front_end_options import (
    FRONT_END_GROUPS,
    FRONT_END_SERVER_OPTIONS,
    FrontEndOptions,
)
from trioserve.cli.help import topic_of
from trioserve.cli.mock import MOCK_GROUPS, MOCK_OPTION
from trioserve.cli.remote_options import DEFAULT_URL, REMOTE_GROUPS, RemoteOptions
from trioserve.cli.top.options import TOP_GROUPS, TopOptions
from trioserve.cli.worker_options import WORKER_GROUPS, WorkerOptions
from trioserve.config import GROUPS, EngineConfig, ServerConfig
from trioserve.config.options import Option, OptionGroup, options_of
from trioserve.config.router import (
    ROUTER_ENGINE_OPTIONS,
    ROUTER_SERVER_OPTIONS,
    RouterConfig,
)
from trioserve.protocol.version import __version__

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
_WORKER_EPILOG = (
    "MODEL is the engine's, as it is found on this host. The worker joins again whenever the "
    "engine is lost. At Ctrl-C or SIGTERM its requests move to other workers. The exit code is "
    "then 0, and 1 if the engine has refused the worker."
)
_FRONT_END_EPILOG = (
    "MODEL is the engine's, as it is found on this host. The other options are the engine's, too. "
    "The front end joins again whenever the engine is lost, and doesn't listen meanwhile."
)
_BENCH_EPILOG = (
    "Without options it asks the server at http://127.0.0.1:8000 for 128 tokens at a time over 8 "
    "streams. "
    "A sweep: --concurrency 1 8 32 or --request-rate 1 2 4, with --plots FOLDER or --html FILE. "
    "Figures are those of vLLM's tool; docs/benchmarking.md defines them. The exit code is 1 if a "
    "request failed."
)


def _sampling_option(name: str, kind: type, help: str, **more: Any) -> Option:
    return Option(
        name=name, kind=kind, default=None, help=help, group="sampling", common=True, **more
    )


SAMPLING_OPTIONS = (
    _sampling_option("max_tokens", int, "most tokens to generate", unset="--max-tokens-default"),
    _sampling_option("min_tokens", int, "fewest tokens to generate"),
    _sampling_option("temperature", float, "0 always takes the most probable token"),
    _sampling_option("top_k", int, "sample from the N most probable tokens"),
    _sampling_option("top_p", float, "sample from the most probable tokens that make up X"),
    _sampling_option(
        "min_p", float, "leave out tokens less probable than X times the most probable one"
    ),
    _sampling_option(
        "repetition_penalty", float, "above 1 discourages tokens that occurred before"
    ),
    _sampling_option("frequency_penalty", float, "discourage tokens by how often they occurred"),
    _sampling_option("presence_penalty", float, "discourage tokens that occurred at all"),
    _sampling_option("stop", str, "end before this text; may be given again", repeatable=True),
    _sampling_option("ignore_eos", bool, "go on past the model's end of text"),
)
"""Fields of SamplingParams that are flags. Without a flag, the model's default holds."""


_SAMPLING_GROUPS = {
    "sampling": OptionGroup("Sampling (defaults: the model's own)", "terminal#Talk to a model")
}
ROUTER_GROUPS = {
    "upstream": OptionGroup("The servers", "router#Start it"),
    "worker": OptionGroup("Routing", "router#How it chooses"),
    "http": GROUPS["http"],
    "log": GROUPS["log"],
}
_Add: TypeAlias = Callable[..., CommandParser]
"""Function that adds a command: name, help, usage, and keywords of :class:`CommandParser`."""


def _options(*classes: type[attrs.AttrsInstance]) -> Iterator[Option]:
    return (option for cls in classes for option in options_of(cls))


def build_parsers() -> tuple[CommandParser, dict[str, CommandParser]]:
    """Return the parser of the commands, and the parsers of single commands by name."""
    parser = CommandParser(
        prog="trioserve", description="Serve large language models, or use one here."
    )
    parser.add_argument("--version", action="version", version=f"trioserve {__version__}")
    commands = parser.add_subparsers(
        metavar="COMMAND", parser_class=CommandParser, title="commands"
    )

    def add(name: str, help: str, usage: str, **more: Any) -> CommandParser:
        command: CommandParser = commands.add_parser(
            name,
            help=help,
            description=help[0].upper() + help[1:] + ".",
            usage=f"trioserve {name} {usage}",
            **more,
        )
        command.set_defaults(command=name)
        return command

    return parser, {
        "serve": _serve(add),
        "route": _route(add),
        "chat": _chat(add),
        "generate": _generate(add),
        "bench": _bench(add),
        "top": _top(add),
        "doctor": _doctor(add),
        "worker": _worker(add),
        "front-end": _front_end(add),
        "worker-certificates": _worker_certificates(add),
    }


def _serve(add: _Add) -> CommandParser:
    command = add(
        "serve",
        "serve a model over HTTP",
        "[MODEL] [options]",
        page="quickstart#Start the server",
        epilog=_EPILOG + _SIGNALS_EPILOG,
    )
    command.add_argument("model", metavar="MODEL", nargs="?", help=_MODEL_HELP)
    command.variables.add("model")
    command.add_options(_options(EngineConfig, ServerConfig), GROUPS, variables=True)
    command.add_options([MOCK_OPTION], MOCK_GROUPS)
    return command


def _route(add: _Add) -> CommandParser:
    command = add(
        "route",
        "route requests to whole servers, each to the one that answers soonest",
        "URL [URL ...] [options]",
        page="router#A router in front of servers",
        epilog=_EPILOG,
    )
    command.add_argument(
        "urls", metavar="URL", nargs="+", help="a trioserve server, such as http://gpu-1:8000"
    )
    shared = (*ROUTER_SERVER_OPTIONS, *ROUTER_ENGINE_OPTIONS)
    options = [each for each in _options(EngineConfig, ServerConfig) if each.name in shared]
    command.add_options([*_options(RouterConfig), *options], ROUTER_GROUPS, variables=True)
    return command


def _chat(add: _Add) -> CommandParser:
    command = add(
        "chat",
        "talk to a model in the terminal",
        "[MODEL] [options]",
        page="terminal#Talk to a model",
        epilog=_EPILOG,
    )
    command.add_argument("model", metavar="MODEL", nargs="?", help=_MODEL_HELP)
    command.add_argument("--system", metavar="TEXT", help="system message before the chat")
    command.add_argument(
        "--history",
        metavar="FILE",
        help="file to keep the lines of the prompt in; off keeps none "
        "(default: $TRIOSERVE_HISTORY, else ~/.local/state/trioserve/chat_history)",
    )
    command.add_argument(
        "--url",
        metavar="URL",
        help="OpenAI-compatible server to talk to, in place of a model that is loaded here; MODEL "
        "is then the server's name for it (default: the first that it lists)",
    )
    command.variables |= {"model", "history"}
    command.add_options(SAMPLING_OPTIONS, _SAMPLING_GROUPS)
    command.add_options(_options(RemoteOptions), REMOTE_GROUPS)
    command.add_options(_options(EngineConfig), GROUPS, variables=True)
    return command


def _generate(add: _Add) -> CommandParser:
    command = add(
        "generate",
        "continue a text",
        "MODEL [PROMPT] [options]",
        page="terminal#Continue a text",
        epilog=_EPILOG,
    )
    command.add_argument("model", metavar="MODEL", help=_MODEL_HELP.partition(" (default")[0])
    command.add_argument(
        "prompt", metavar="PROMPT", nargs="?", help="text to continue (default: standard input)"
    )
    command.add_options(SAMPLING_OPTIONS, _SAMPLING_GROUPS)
    command.add_options(_options(EngineConfig), GROUPS, variables=True)
    return command


def _bench(add: _Add) -> CommandParser:
    command = add(
        "bench",
        "measure a server under load",
        "[URL] [options]",
        page="benchmarking#Benchmarking",
        epilog=_BENCH_EPILOG,
    )
    command.add_argument(
        "url",
        metavar="URL",
        nargs="?",
        help=f"an OpenAI-compatible server, with or without /v1 (default: {DEFAULT_URL})",
    )
    command.add_options(_options(BenchOptions), BENCH_GROUPS, lists=True)
    command.add_options([MOCK_OPTION], MOCK_GROUPS)
    return command


def _top(add: _Add) -> CommandParser:
    command = add(
        "top",
        "watch a server: rates, latencies, pages, requests, tasks",
        "[URL] [options]",
        page="terminal#Watch a server",
    )
    command.add_argument(
        "url", metavar="URL", nargs="?", help=f"a trioserve server (default: {DEFAULT_URL})"
    )
    command.add_argument("--once", action="store_true", help="print one picture and leave")
    command.add_argument("--json", action="store_true", help="print pictures as lines of JSON")
    command.add_options(_options(TopOptions), TOP_GROUPS)
    return command


def _doctor(add: _Add) -> CommandParser:
    command = add(
        "doctor",
        "show what this machine has, and what is missing",
        "[--json]",
        page="quickstart#When something is missing",
    )
    command.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return command


def _worker(add: _Add) -> CommandParser:
    command = add(
        "worker",
        "compute for an engine on another host",
        "[MODEL] --join HOST:PORT --tls FOLDER [options]",
        page="workers#Other hosts",
        epilog=_WORKER_EPILOG,
    )
    command.add_argument("model", metavar="MODEL", nargs="?", help=_MODEL_HELP)
    command.add_options(_options(WorkerOptions), WORKER_GROUPS)
    return command


def _front_end(add: _Add) -> CommandParser:
    command = add(
        "front-end",
        "serve HTTP for an engine on another host",
        "[MODEL] --join HOST:PORT --tls FOLDER [options]",
        page="front-ends#On other hosts",
        epilog=_FRONT_END_EPILOG + _SIGNALS_EPILOG,
    )
    command.add_argument("model", metavar="MODEL", nargs="?", help=_MODEL_HELP)
    command.add_options(_options(FrontEndOptions), FRONT_END_GROUPS)
    own = [each for each in _options(ServerConfig) if each.name in FRONT_END_SERVER_OPTIONS]
    command.add_options(own, FRONT_END_GROUPS, variables=True)
    return command


def _worker_certificates(add: _Add) -> CommandParser:
    command = add(
        "worker-certificates",
        "make the certificates of an engine, and its workers and front ends on other hosts",
        "FOLDER",
        page="workers#Other hosts",
    )
    command.add_argument("folder", metavar="FOLDER", help="new folder for the files")
    return command


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line. A wrong one exits with code 2 and a one-line error.

    The namespace holds ``command`` and the given options as text.
    """
    given = sys.argv[1:] if argv is None else list(argv)
    parser, commands = build_parsers()
    if not given:
        parser.print_help(sys.stderr)
        parser.exit(2)
    if given[0] not in commands:
        parser.parse_args(given)
        parser.error(f"no command in {' '.join(given)!r}")
    # Intermixed, so that MODEL and PROMPT may be anywhere between the flags.
    command = commands[given[0]]
    topic = topic_of(given[1:])
    if topic is not None:
        command.show_topic(topic)
    words = command.without_unknown(given[1:], has_tables=given[0] in _COMMANDS_WITH_MODELS)
    arguments, unknown = command.parse_known_intermixed_args(words)
    if unknown:
        command.error(f"unknown: {' '.join(unknown)}")
    return arguments
