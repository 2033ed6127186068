"""The state of the screen: the newest snapshot, the history, and the effect of keys."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

import attrs

from trioserve.observability.live.schema import (
    Hello,
    Quantiles,
    RequestRow,
    Snapshot,
    TaskNode,
    WorkerRates,
    WorkerRow,
)

_HISTORY = 240
"""Number of snapshots in a sparkline."""


def arrival_of(row: RequestRow) -> float:
    """Return the arrival time of a request, in Unix seconds."""
    return row.timeline[0][1] if row.timeline else 0.0


SORTS: dict[str, Callable[[RequestRow], float] | None] = {
    "newest": None,  # The order of the feed.
    "oldest": arrival_of,
    "prompt": lambda row: -row.prompt_tokens,
    "output": lambda row: -row.output_tokens,
    "pages": lambda row: -row.pages,
}
"""Sort keys of the requests, by name."""

_MOVES = {"up": -1, "down": 1, "k": -1, "j": 1}


@attrs.frozen
class Sample:
    """The figures of one snapshot in sparklines."""

    generated: float
    prompts: float
    finished: float
    ttft: float | None
    itl: float | None
    queue: float | None
    idle: float | None
    workers: Mapping[int, WorkerRates]
    """The rates of each worker, by its number."""

    @classmethod
    def of(cls, snapshot: Snapshot) -> Sample:
        rates, latency = snapshot.rates, snapshot.latency
        return cls(
            generated=rates.generated_tokens_per_s,
            prompts=rates.prompt_tokens_per_s,
            finished=rates.requests_per_s,
            ttft=_median(latency.ttft),
            itl=_median(latency.itl),
            queue=_median(latency.queue),
            idle=rates.gpu_idle_share,
            workers={each.index: each.rates for each in snapshot.workers},
        )


def _median(quantiles: Quantiles | None) -> float | None:
    return None if quantiles is None else quantiles.p50


@attrs.define(eq=False, kw_only=True)
class View:
    """State of the screen. Times are on the caller's clock, in snapshots on the server's."""

    url: str
    hello: Hello | None = None
    snapshot: Snapshot | None = None
    speeds: dict[str, float] = attrs.field(factory=dict)
    """Tokens per second of each request since the previous snapshot, by id."""
    samples: deque[Sample] = attrs.field(factory=lambda: deque(maxlen=_HISTORY))
    trouble: str = ""
    """Reason for the loss of the feed; empty while it is open."""
    received: float | None = None
    """Arrival time of the newest snapshot."""
    paused: bool = False
    show_tasks: bool = False
    sort: str = "newest"
    worker: int | None = None
    """Number of the worker that is looked at alone; None for all."""
    scroll: int = 0
    """Number of lines of the lower part that are scrolled out at the top."""
    quit: bool = False
    _waiting: Snapshot | None = None
    """Newest snapshot while paused."""
    _unseen: deque[Sample] = attrs.field(factory=lambda: deque(maxlen=_HISTORY))

    def on_open(self, hello: Hello) -> None:
        """Note that the feed was opened, perhaps again and by another process."""
        self.hello, self.trouble = hello, ""

    def on_lost(self, why: str) -> None:
        """Note that the feed was lost."""
        self.trouble = why

    def take(self, snapshot: Snapshot, now: float) -> None:
        """Show ``snapshot``, or keep it for later while paused."""
        self.received = now
        samples = self._unseen if self.paused else self.samples
        if self.snapshot is not None:  # The first one has no rates.
            samples.append(Sample.of(snapshot))
        if self.paused:
            self._waiting = snapshot
        else:
            self._show(snapshot)

    def _show(self, snapshot: Snapshot) -> None:
        before, self.snapshot = self.snapshot, snapshot
        self.speeds = {} if before is None else _speeds(before, snapshot)

    def press(self, key: str, page: int = 10) -> None:
        """Handle a key; ``page`` is the number of visible lines of the lower part."""
        if key == "q":
            self.quit = True
        elif key in ("p", " "):
            self._toggle_pause()
        elif key == "t":
            self.show_tasks, self.scroll = not self.show_tasks, 0
        elif key == "s":
            names = list(SORTS)
            self.sort = names[(names.index(self.sort) + 1) % len(names)]
            self.scroll = 0
        elif key in ("w", "W"):
            self._choose_worker(1 if key == "w" else -1)
        elif key == "home":
            self.scroll = 0
        elif key == "end":
            self.scroll = self.num_lines
        else:
            pages = {"page up": -page, "page down": page}
            self.scroll += _MOVES.get(key) or pages.get(key) or 0
        self.scroll = min(max(self.scroll, 0), max(0, self.num_lines - page))

    def _toggle_pause(self) -> None:
        self.paused = not self.paused
        if not self.paused and self._waiting is not None:
            self.samples.extend(self._unseen)
            self._show(self._waiting)
        self._unseen.clear()
        self._waiting = None

    def _choose_worker(self, step: int) -> None:
        """Look at the next worker alone, and at all after the last one."""
        numbers = [None, *(each.index for each in self.workers)]
        place = numbers.index(self.worker) if self.worker in numbers else 0
        self.worker = numbers[(place + step) % len(numbers)]
        self.scroll = 0

    @property
    def workers(self) -> list[WorkerRow]:
        """The workers if there are several; a single one is the whole."""
        workers = [] if self.snapshot is None else self.snapshot.workers
        return workers if len(workers) > 1 else []

    @property
    def chosen(self) -> WorkerRow | None:
        """The worker that is looked at alone, if there is one."""
        return next((each for each in self.workers if each.index == self.worker), None)

    @property
    def rows(self) -> list[RequestRow]:
        """Requests in the chosen order, of the chosen worker."""
        rows = [] if self.snapshot is None else list(self.snapshot.requests)
        if self.chosen is not None:
            rows = [row for row in rows if row.worker == self.worker]
        key = SORTS[self.sort]
        return rows if key is None else sorted(rows, key=key)

    @property
    def num_lines(self) -> int:
        """Number of lines of the lower part, visible or not."""
        if self.snapshot is None:
            return 0
        if self.show_tasks:
            return _num_nodes(self.snapshot.tasks)
        return len(self.rows)


def _num_nodes(node: TaskNode) -> int:
    return 1 + sum(_num_nodes(child) for child in node.children)


def _speeds(before: Snapshot, snapshot: Snapshot) -> dict[str, float]:
    passed = snapshot.now - before.now
    tokens = {row.id: row.output_tokens for row in before.requests}
    if passed <= 0:
        return {}
    return {
        row.id: max(0, row.output_tokens - tokens[row.id]) / passed
        for row in snapshot.requests
        if row.id in tokens and row.state != "finished"
    }
