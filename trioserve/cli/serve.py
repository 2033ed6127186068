"""``trioserve serve``: the server process, with its signals and its output."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs

from trioserve.cli.loading import LoadingReport
from trioserve.cli.output import writing
from trioserve.cli.signals import SignalledProcess
from trioserve.cli.welcome import welcome
from trioserve.config import ServerConfig
from trioserve.front_ends.serving import serve
from trioserve.http.server.connections import raise_descriptor_limit
from trioserve.model_files.locate import default_name
from trioserve.protocol import wire
from trioserve.protocol.gc_tuning import rare_collections


@attrs.define(eq=False)
class _Start:
    """The server's ``trio.TaskStatus``."""

    process: SignalledProcess
    config: ServerConfig
    report: LoadingReport
    freeze: Callable[[], None]
    """Called when the server listens, to freeze long-lived objects for the garbage collector."""

    def started(self, value: Sequence[str] = ()) -> None:
        """Print the addresses that the server listens on."""
        self.process.serving = True
        self.freeze()
        self.report.close()
        with writing():
            print(f"Serving {_model_name(self.config)} at {', '.join(value)}", flush=True)
            # A program that reads the output expects only the line above.
            if sys.stdout.isatty():
                print("\n".join(welcome(self.config, value[0])), flush=True)


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
    process = SignalledProcess(config.shutdown_timeout)
    with LoadingReport() as report, rare_collections() as freeze:
        start = _Start(process, config, report, freeze)

        async def run() -> int:
            return await serve(
                config,
                shutdown=process.shutdown,
                on_progress=report,
                mock=mock,
                task_status=start,
            )

        return await process.run(run)
