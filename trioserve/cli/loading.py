"""The progress of loading a model: bars on a terminal, log lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import attrs

from trioserve.observability.logs import get_logger
from trioserve.protocol import wire

if TYPE_CHECKING:
    import rich.progress

_log = get_logger("trioserve.cli.loading")

EVERY = 5.0
"""Seconds between two log lines of one stage."""
_TITLES = {"kernels": "compiling kernels, once on this machine", "weights": "reading weights"}


@attrs.define(eq=False)
class LoadingReport:
    """The ``on_progress`` of an engine, and a context manager. Leaving it removes the bars.

    Later progress, from a restarted worker, is logged.
    """

    _bars: rich.progress.Progress | None = None
    _tasks: dict[str, rich.progress.TaskID] = attrs.field(factory=dict)
    _stage: str | None = None
    _logged_at: float = 0.0
    """Time of the last logged line."""

    def __enter__(self) -> LoadingReport:
        if sys.stderr.isatty():
            import rich.console
            import rich.progress

            self._bars = rich.progress.Progress(
                rich.progress.TextColumn("{task.description}"),
                rich.progress.BarColumn(),
                rich.progress.TaskProgressColumn(),
                console=rich.console.Console(stderr=True),
                transient=True,
            )
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bars. Idempotent."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def __call__(self, progress: wire.LoadingProgress) -> None:
        """Show ``progress``. Never blocks for longer than a write to stderr."""
        if self._bars is None:
            self._log_line(progress)
            return
        if progress.stage not in self._tasks:
            title = _TITLES.get(progress.stage, progress.stage)
            self._tasks[progress.stage] = self._bars.add_task(title)
        # With a total of 0, the stage's length is unknown, and its bar only pulses.
        self._bars.update(
            self._tasks[progress.stage], completed=progress.done, total=progress.total or None
        )

    def _log_line(self, progress: wire.LoadingProgress) -> None:
        """Log the start of a stage, and its progress every ``EVERY`` seconds."""
        now = time.monotonic()
        if progress.stage != self._stage:
            _log.info("loading", stage=progress.stage)
        elif now - self._logged_at >= EVERY:
            _log.info("loading", stage=progress.stage, done=progress.done, total=progress.total)
        else:
            return
        self._stage, self._logged_at = progress.stage, now
