"""``trioserve serve``: the server process, with its signals and its output."""

from __future__ import annotations

import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import attrs
import trio

from trioserve._util.exception_groups import sole_exception
from trioserve.cli.loading import LoadingReport
from trioserve.cli.output import writing
from trioserve.cli.welcome import welcome
from trioserve.config import ServerConfig
from trioserve.front_ends.serving import serve
from trioserve.http.server.connections import raise_descriptor_limit
from trioserve.model_files.locate import default_name
from trioserve.observability.logs import get_logger
from trioserve.observability.signals import dumping_tasks
from trioserve.protocol import wire
from trioserve.protocol.gc_tuning import rare_collections

CUT_OFF = 3
"""Exit code of a server that drained but cut requests off."""

_log = get_logger("trioserve.serve")


@attrs.define(eq=False)
class _Process:
    """The state of the server process, for signals. It is also the server's ``trio.TaskStatus``."""

    config: ServerConfig
    report: LoadingReport
    freeze: Callable[[], None]
    """Called when the server listens, to freeze long-lived objects for the garbage collector."""
    shutdown: trio.Event = attrs.field(factory=trio.Event)
    serving: bool = False
    exit_code: int = 0

    def started(self, value: Sequence[str] = ()) -> None:
        """Print the addresses that the server listens on."""
        self.serving = True
        self.freeze()
        self.report.close()
        with writing():
            print(f"Serving {_model_name(self.config)} at {', '.join(value)}", flush=True)
            # A program that reads the output expects only the line above.
            if sys.stdout.isatty():
                print("\n".join(welcome(self.config, value[0])), flush=True)

    async def watch(self, signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
        """Drain at the first signal. End at the second, or at one before the server listens."""
        async for number in signals:
            if self.shutdown.is_set() or not self.serving:
                self.exit_code = 128 + number
                scope.cancel()
                return
            _log.info(
                "draining",
                signal=signal.Signals(number).name,
                seconds=self.config.shutdown_timeout,
                again="ends at once",
            )
            self.shutdown.set()


def _ending_signals() -> list[int]:
    """Return the signals that end the server; SIGHUP only if ``nohup`` doesn't ignore it."""
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    return [*signals]


def _model_name(config: ServerConfig) -> str:
    """Return the first name under which the model is served."""
    if config.served_model_name:
        return config.served_model_name[0]
    path = Path(config.engine.model)
    return default_name(path) if path.exists() else config.engine.model


async def run_server(config: ServerConfig, mock: wire.MockSteps | None = None) -> int:
    """Serve until drained or ended by a signal, and return the process's exit code.

    The code is 0 if all requests finished, ``CUT_OFF`` if ``shutdown_timeout`` cut some off, and
    128 plus the signal's number if a signal ended the server at once.

    Args:
        config: Options of the engine and the server.
        mock: Step times of a mock worker; None for a real worker.

    Raises:
        TrioserveError: The model can't be loaded, the address can't be used, or the engine failed.
    """
    raise_descriptor_limit()
    signals = trio.open_signal_receiver(*_ending_signals())
    with (
        LoadingReport() as report,
        signals as received,
        dumping_tasks(),
        rare_collections() as freeze,
    ):
        process = _Process(config, report, freeze)
        failure: BaseException | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(process.watch, received, nursery.cancel_scope)
                num_cut = await serve(
                    config,
                    shutdown=process.shutdown,
                    on_progress=report,
                    mock=mock,
                    task_status=process,
                )
                if num_cut:
                    _log.warning("requests were cut off", number=num_cut)
                    process.exit_code = CUT_OFF
                nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            failure = sole_exception(group)
        # Raised outside of the except block, which would replace the error's cause.
        if failure is not None:
            raise failure
    return process.exit_code
