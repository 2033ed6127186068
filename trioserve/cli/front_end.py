"""``trioserve front-end``: a front end for an engine on another host."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import trio

from trioserve.cli.front_end_options import FrontEndOptions
from trioserve.cli.output import writing
from trioserve.cli.signals import SignalledProcess
from trioserve.cli.worker import find_model
from trioserve.config import ServerConfig
from trioserve.front_ends.remote.agent import FrontEndAgent
from trioserve.http.server.connections import raise_descriptor_limit
from trioserve.http.server.listeners import check_address
from trioserve.model_files.locate import default_name
from trioserve.observability.logs import setup_logging
from trioserve.protocol.gc_tuning import rare_collections
from trioserve.workers.remote.tls import front_end_tls


@attrs.define(eq=False)
class _Reporter:
    """The output of a front end, and what the engine's options change in its process."""

    process: SignalledProcess
    model: str
    path: Path
    freeze: Callable[[], None]
    """Freezes long-lived objects for the garbage collector."""
    _has_listened: bool = False

    def on_start(self, config: ServerConfig) -> None:
        """Log as the engine does."""
        setup_logging(config.log_level, config.log_format)
        self.process.shutdown_timeout = config.shutdown_timeout

    def on_listening(self, urls: Sequence[str]) -> None:
        """Print the addresses, the first time that the front end listens."""
        # Objects of an engine that was lost are garbage.
        gc.unfreeze()
        self.freeze()
        if not self._has_listened:
            self._has_listened = True
            name = default_name(self.path) if Path(self.model).exists() else self.model
            with writing():
                print(f"Serving {name} at {', '.join(urls)}", flush=True)


async def run_front_end(options: FrontEndOptions, config: ServerConfig, model: str) -> int:
    """Serve an engine until a signal ends the front end, and return the process's exit code.

    The first signal lets running requests finish, the second ends it at once.

    Args:
        options: Where the engine is.
        config: The front end's own options of a server.
        model: The engine's model, as it is found on this host.

    Raises:
        TrioserveError: The model, the certificates or the address can't be used, or the engine has
            refused the front end.
    """
    assert options.join is not None
    assert options.tls is not None
    tls = front_end_tls(options.tls)
    await check_address(config)
    path, checksum = await trio.to_thread.run_sync(find_model, model, abandon_on_cancel=True)
    raise_descriptor_limit()
    process = SignalledProcess(config.shutdown_timeout, serving=True)
    with rare_collections() as freeze:
        reporter = _Reporter(process, model, Path(path), freeze)
        agent = FrontEndAgent(
            engine=options.join,
            tls=tls,
            model=path,
            checksum=checksum,
            config=config,
            on_start=reporter.on_start,
            on_listening=reporter.on_listening,
            leaving=process.shutdown,
        )

        async def run() -> int:
            await agent.run()
            return agent.num_cut

        return await process.run(run)
