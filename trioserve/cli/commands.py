"""The commands: each checks its options, then runs an engine, a server or a report.

Only here is logging set up, and only ``serve``, ``route``, ``worker``, ``front-end``, ``top`` and,
at a terminal, ``chat`` set signal handlers. A program that uses trioserve as a library keeps its
own.

Exit codes: 0 for success, such as a drained server; 1 for a failure; 2 for a wrong option; 3 for a
server that drained but cut requests off; 128 plus the signal's number if a signal ended the command
at once.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trioserve.cli.flags import (
    bench_options,
    chat_server,
    embedded_config,
    engine_config,
    front_end_options,
    router_config,
    sampling_fields,
    server_config,
    top_options,
    unknown_variable_lines,
    worker_options,
)
from trioserve.cli.mock import mock_steps
from trioserve.cli.output import OutputError, discard_output, writing
from trioserve.cli.parser import parse
from trioserve.cli.usage import UsageError
from trioserve.config import EngineConfig
from trioserve.protocol.errors import TrioserveError
from trioserve.protocol.gc_tuning import without_gc
from trioserve.protocol.log_output import escaped
from trioserve.protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from trioserve.cli.remote_options import RemoteOptions
    from trioserve.engine.engine import Engine

# Commands import what only they need (trio, the server, rich), so that --help and the error of a
# wrong option are fast.

_KEPT = "\n\t"


def run() -> None:
    """Run the ``trioserve`` command. A crash of the interpreter prints all threads."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # There may be no stderr.
        faulthandler.enable()
    code = main()
    if code > 128:
        # A signal ended the command. Python would wait for abandoned threads, such as a download.
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; a wrong command line exits with 2."""
    arguments = parse(argv)
    for line in unknown_variable_lines(os.environ):
        print(f"trioserve: {escaped(line)}", file=sys.stderr)
    try:
        return _run_command(arguments)
    except UsageError as error:
        print(f"trioserve {arguments.command}: {escaped(str(error), _KEPT)}", file=sys.stderr)
        return 2
    except TrioserveError as error:
        print(f"trioserve: {escaped(str(error), _KEPT)}", file=sys.stderr)
        if isinstance(error, OutputError):
            discard_output()
        return 1


def _run_command(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code, also after Ctrl-C or a closed output pipe."""
    code = 0
    try:
        code = _COMMANDS[arguments.command](vars(arguments))
    except* KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except* BrokenPipeError:
        discard_output()
        code = 128 + signal.SIGPIPE
    return code


def _serve(arguments: dict[str, Any]) -> int:
    config = server_config(arguments, os.environ)
    mock = mock_steps(arguments)
    # Without a handler, the signal for a task dump would end the process during the imports.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with without_gc():
        import trio

        from trioserve.cli.serve import run_server
        from trioserve.observability.logs import setup_logging

    setup_logging(config.log_level, config.log_format)
    return trio.run(run_server, config, mock)


def _route(arguments: dict[str, Any]) -> int:
    config = router_config(arguments, os.environ)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with without_gc():
        import trio

        from trioserve.cli.route import run_router
        from trioserve.observability.logs import setup_logging

    setup_logging(config.server.log_level, config.server.log_format)
    return trio.run(run_router, config)


def _chat(arguments: dict[str, Any]) -> int:
    server = chat_server(arguments)
    fields = sampling_fields(arguments)
    import trio

    from trioserve.cli.chat import chat
    from trioserve.cli.chat_backends import EngineChatBackend, find_server
    from trioserve.cli.conversation import ChatConversation
    from trioserve.cli.history import History, history_path
    from trioserve.cli.remote import remote_of
    from trioserve.cli.terminal import Terminal

    conversation = ChatConversation(system=arguments["system"], fields=fields)
    terminal = Terminal.standard(History(history_path(arguments["history"], os.environ)))

    async def with_engine(engine: Engine) -> None:
        await chat(EngineChatBackend(engine), conversation, terminal=terminal)

    async def with_server(options: RemoteOptions) -> None:
        remote, address = remote_of(options)
        backend = await find_server(remote, address.base_path, arguments["model"])
        await chat(backend, conversation, terminal=terminal)

    if server is None:
        _with_engine(engine_config(arguments, os.environ), with_engine)
    else:
        trio.run(with_server, server)
    return 0


def _generate(arguments: dict[str, Any]) -> int:
    config = engine_config(arguments, os.environ)
    fields = sampling_fields(arguments)
    prompt = _read_prompt(arguments["prompt"])
    from trioserve.cli.generate import generate

    async def use(engine: Engine) -> None:
        params = SamplingParams(**{**engine.generation_defaults, **fields})
        await generate(engine, prompt, params)

    _with_engine(config, use)
    return 0


def _with_engine(config: EngineConfig, use: Callable[[Engine], Awaitable[None]]) -> None:
    import trio

    from trioserve.cli.loading import LoadingReport
    from trioserve.engine.nursery import open_engine
    from trioserve.observability.logs import setup_logging

    async def main() -> None:
        with LoadingReport() as report:
            async with open_engine(config, on_progress=report) as engine:
                report.close()
                await use(engine)

    setup_logging("warning", "console")
    trio.run(main)


def _read_prompt(given: str | None) -> str:
    """Return the prompt from the command line, or all of stdin without its last line end."""
    if given is None:
        if sys.stdin.isatty():
            raise UsageError("give a PROMPT, or pipe one in")
        given = sys.stdin.read().removesuffix("\n")
    if not given:
        raise UsageError("the prompt is empty")
    return given


def _doctor(arguments: dict[str, Any]) -> int:
    from trioserve.cli import doctor

    report = doctor.examine()
    with writing():
        if arguments["json"]:
            print(doctor.as_json(report), flush=True)
        else:
            import rich.console

            rich.console.Console(highlight=False).print(doctor.as_table(report))
    return 0 if report.healthy else 1


def _top(arguments: dict[str, Any]) -> int:
    options = top_options(arguments)
    import trio

    from trioserve.cli.top.command import run_top

    return trio.run(run_top, options)


def _bench(arguments: dict[str, Any]) -> int:
    options = bench_options(arguments)
    mock = mock_steps(arguments)
    engine = embedded_config(options, os.environ)
    if mock is not None and engine is None:
        raise UsageError("--mock-worker needs --embedded")
    from trioserve.cli.bench import run_bench
    from trioserve.observability.logs import setup_logging

    setup_logging("warning", "console")
    return run_bench(options, engine, mock)


def _worker(arguments: dict[str, Any]) -> int:
    options, model = worker_options(arguments, os.environ)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    import trio

    from trioserve.cli.worker import run_agent
    from trioserve.observability.logs import setup_logging

    setup_logging("info", "auto")
    return trio.run(run_agent, options, model)


def _front_end(arguments: dict[str, Any]) -> int:
    options, config, model = front_end_options(arguments, os.environ)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with without_gc():
        import trio

        from trioserve.cli.front_end import run_front_end
        from trioserve.observability.logs import setup_logging

    setup_logging("info", "auto")
    return trio.run(run_front_end, options, config, model)


def _worker_certificates(arguments: dict[str, Any]) -> int:
    from trioserve.workers.remote.certificates import make_certificates

    with writing():
        for path in make_certificates(Path(arguments["folder"])):
            print(path)
    return 0


_COMMANDS: dict[str, Callable[[dict[str, Any]], int]] = {
    "serve": _serve,
    "route": _route,
    "chat": _chat,
    "generate": _generate,
    "doctor": _doctor,
    "bench": _bench,
    "top": _top,
    "worker": _worker,
    "front-end": _front_end,
    "worker-certificates": _worker_certificates,
}
