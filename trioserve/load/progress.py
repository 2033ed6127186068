"""The progress of a run on a terminal."""

from __future__ import annotations

import sys
from types import TracebackType

import rich.console
import rich.progress
import trio

from trioserve.load.loop import Progress

_INTERVAL = 0.25
"""Seconds between two updates."""


class ProgressBar:
    """A line on stderr that shows ``progress``; nothing if stderr isn't a terminal."""

    def __init__(self, label: str, progress: Progress) -> None:
        self._progress = progress
        self._bar: rich.progress.Progress | None = None
        if sys.stderr.isatty():
            self._bar = rich.progress.Progress(
                rich.progress.TextColumn("{task.description}"),
                rich.progress.BarColumn(),
                rich.progress.TextColumn("{task.fields[counts]}"),
                rich.progress.TimeElapsedColumn(),
                console=rich.console.Console(stderr=True),
                auto_refresh=False,  # It would need a thread.
                transient=True,
            )
            self._task = self._bar.add_task(label, total=None, counts="")

    def __enter__(self) -> ProgressBar:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    async def follow(self) -> None:
        """Show the counts until cancelled."""
        if self._bar is None:
            return
        before, then = 0, trio.current_time()
        rate = 0.0
        while True:
            counts = self._progress
            events, now = counts.events, trio.current_time()
            if now > then:
                rate = 0.7 * rate + 0.3 * (events - before) / (now - then)
                before, then = events, now
            parts = [f"{counts.done}/{counts.total}", f"{counts.running} running"]
            parts.append(f"{rate:,.0f} tokens/s")
            if counts.failed:
                parts.append(f"{counts.failed} failed")
            self._bar.update(
                self._task,
                total=counts.total,
                completed=counts.done,
                counts=", ".join(parts),
                refresh=True,
            )
            await trio.sleep(_INTERVAL)
