"""A process that serves, and its signals: the first lets it drain, the second ends it at once."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Awaitable, Callable

import attrs
import trio

from trioserve._util.exception_groups import sole_exception
from trioserve.observability.logs import get_logger
from trioserve.observability.signals import dumping_tasks

CUT_OFF = 3
"""Exit code of a server that drained but cut requests off."""

_log = get_logger("trioserve.serve")


@attrs.define(eq=False)
class SignalledProcess:
    """The state of a process that serves, for signals.

    Args:
        shutdown_timeout: Seconds that it gets to end in order after the first signal.
        serving: True once it has something to end in order: a server listens.
    """

    shutdown_timeout: float
    serving: bool = False
    shutdown: trio.Event = attrs.field(init=False, factory=trio.Event)
    """Set when it is to drain."""
    exit_code: int = attrs.field(init=False, default=0)

    async def run(self, serve: Callable[[], Awaitable[int | None]]) -> int:
        """Serve until drained or ended by a signal, and return the process's exit code.

        Args:
            serve: Serves until :attr:`shutdown` is set; returns the number of requests cut off, if
                it knows.
        """
        failure: BaseException | None = None
        with trio.open_signal_receiver(*_ending_signals()) as received, dumping_tasks():
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._watch, received, nursery.cancel_scope)
                    num_cut = await serve()
                    if num_cut:
                        _log.warning("requests were cut off", number=num_cut)
                        self.exit_code = CUT_OFF
                    nursery.cancel_scope.cancel()
            except BaseExceptionGroup as group:
                failure = sole_exception(group)
        # Raised outside of the except block, which would replace the error's cause.
        if failure is not None:
            raise failure
        return self.exit_code

    async def _watch(self, signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
        """Drain at the first signal. End at the second, or at one before the server listens."""
        async for number in signals:
            if self.shutdown.is_set() or not self.serving:
                self.exit_code = 128 + number
                scope.cancel()
                return
            _log.info(
                "draining",
                signal=signal.Signals(number).name,
                seconds=self.shutdown_timeout,
                again="ends at once",
            )
            self.shutdown.set()


def _ending_signals() -> list[int]:
    """Return the signals that end the server; SIGHUP only if ``nohup`` doesn't ignore it."""
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    return [*signals]
