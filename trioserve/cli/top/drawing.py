"""A view as lines of text that fit the screen."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
from rich.text import Text

from trioserve.cli.top.glyphs import Glyphs, bar, count, duration, seconds, sparkline
from trioserve.cli.top.table import request_lines, task_lines
from trioserve.cli.top.view import Sample, View
from trioserve.cli.top.workers import (
    front_ends,
    processes_of,
    restarts_of,
    worker_line,
    worker_lines,
    workers_line,
)
from trioserve.observability.live.schema import (
    Hello,
    Pages,
    Quantiles,
    Snapshot,
    WorkerRates,
    WorkerRow,
)
from trioserve.protocol.errors import printable

_WIDE = 76
"""Columns from which rates and latencies share lines."""
_SHORT = 16
"""Lines below which sparklines are left out."""
_LATE = 3.0
"""Seconds without a snapshot, beyond the interval, after which the title warns."""
_SHORT_FIGURE, _LONG_FIGURE = 11, 18
_HEALTH_STYLES = {"ok": "green", "draining": "yellow", "no_worker": "red", "stalled": "red"}


@attrs.frozen
class Drawing:
    """The lines of one screen; ``page`` is the number of those in the lower part, which scrolls."""

    lines: list[Text]
    page: int

    @property
    def text(self) -> Text:
        """All lines as one text."""
        return Text("\n").join(self.lines)


def draw(
    view: View,
    width: int,
    height: int | None,
    glyphs: Glyphs,
    *,
    now: float = 0.0,
    interval: float = 1.0,
) -> Drawing:
    """Draw the view at that size; ``now`` is on the view's clock.

    Without a ``height``, draw everything except the keys.
    """
    upper = [_title(view, now, interval)]
    if view.hello is not None and view.snapshot is not None:
        upper += _upper(view, view.hello, view.snapshot, width, height, glyphs)
    head, body = (task_lines if view.show_tasks else request_lines)(view, width, glyphs)
    lower = [head]
    if height is None:
        page = len(body)
        lower += body
        footer = []
    else:
        page = max(height - len(upper) - 2, 0)
        start = min(view.scroll, max(0, len(body) - page))
        shown = body[start : start + page]
        lower += shown + [Text("")] * (page - len(shown))
        footer = [_footer(view, start, page, len(body), glyphs, width)]
    lines = [*upper, *lower, *footer][:height]
    for line in lines:
        line.no_wrap = True
        line.truncate(width, overflow="crop")
    return Drawing(lines, page)


def _upper(
    view: View, hello: Hello, snapshot: Snapshot, width: int, height: int | None, glyphs: Glyphs
) -> list[Text]:
    """Return the lines about the server, or about the worker that is looked at alone."""
    chosen = view.chosen
    lines = [workers_line(hello, snapshot) if view.workers else _worker(hello, snapshot)]
    if chosen is not None:
        lines.append(worker_line(chosen, snapshot.now))
    if height is None or height >= _SHORT:
        if chosen is None:
            lines += _meters(view, snapshot, width, glyphs)
        else:
            lines += _worker_meters(view, chosen, width, glyphs)
    if chosen is not None:
        lines.append(_pages(chosen.pages, chosen.rates.cache_hit_share, width, glyphs))
        now = Text(f" {'requests':<12} ").append(f"{chosen.running} running", style="bold")
        return [*lines, now.append(f", {chosen.waiting} waiting")]
    lines += [
        _pages(snapshot.pages, snapshot.rates.cache_hit_share, width, glyphs),
        _requests(snapshot),
    ]
    if view.workers:
        most = len(view.workers) if height is None else max(height // 3, 2)
        lines += worker_lines(snapshot, width, most, glyphs)
    return lines


def _title(view: View, now: float, interval: float) -> Text:
    """Return the first line, with the worst problem first, because the line may be cut."""
    hello, snapshot = view.hello, view.snapshot
    line = Text(" ").append("trioserve" if hello is None else printable(hello.model), style="bold")
    if view.trouble:
        line.append(f"  lost, trying again: {view.trouble}", style="red")
    elif snapshot is not None:
        health = printable(snapshot.health)
        line.append(f"  {health}", style=_HEALTH_STYLES.get(health, ""))
        if snapshot.paused:
            line.append("  scheduling is paused", style="yellow")
    if view.received is not None and now - view.received > interval + _LATE:
        line.append(f"  no snapshot for {now - view.received:.0f} s", style="red")
    if view.paused:
        line.append("  ").append("PAUSED", style="reverse")
    if hello is not None and snapshot is not None:
        up = duration(snapshot.now - hello.started)
        line.append(f"  up {up}  {view.url}  {printable(hello.version)}", style="dim")
        line.append(f"  {printable(hello.device)}", style="dim")
    return line


def _worker(hello: Hello, snapshot: Snapshot) -> Text:
    worker = snapshot.worker
    line = Text(f" {'worker':<12} ")
    line.append(printable(worker.state), style="green" if worker.state == "running" else "red")
    line.append(processes_of(worker.pid, worker.rank_pids))
    line.append(f" for {duration(snapshot.now - worker.since)}")
    if worker.restarts:
        line.append(f", {restarts_of(worker.restarts, worker.last_death)}", style="yellow")
    return line.append_text(front_ends(hello))


@attrs.frozen
class _Meter:
    """A figure and its history."""

    name: str
    figure: str
    past: Callable[[Sample], float | None]
    top: float | None = None
    """Value of the sparkline's top; None for the largest in the history."""


def _meters(view: View, snapshot: Snapshot, width: int, glyphs: Glyphs) -> list[Text]:
    rates, latency = snapshot.rates, snapshot.latency
    idle = "-" if rates.gpu_idle_share is None else f"{rates.gpu_idle_share:.0%}"
    left = [
        _Meter("generated", f"{count(rates.generated_tokens_per_s)} tok/s", lambda m: m.generated),
        _Meter("prompts", f"{count(rates.prompt_tokens_per_s)} tok/s", lambda m: m.prompts),
        _Meter("finished", f"{rates.requests_per_s:.1f} req/s", lambda m: m.finished),
        _Meter("device idle", idle, lambda m: m.idle, top=1.0),
    ]
    right = [
        _Meter("first token", _quantiles(latency.ttft), lambda m: m.ttft),
        _Meter("next token", _quantiles(latency.itl), lambda m: m.itl),
        _Meter("in the queue", _quantiles(latency.queue), lambda m: m.queue),
    ]
    steps = Text(f" {'steps':<12} {_steps(rates)}")
    return _beside(view, left, right, steps, width, glyphs)


def _worker_meters(view: View, worker: WorkerRow, width: int, glyphs: Glyphs) -> list[Text]:
    """Return the meters of one worker; latencies are known of the server only."""
    rates, index = worker.rates, worker.index

    def past(read: Callable[[WorkerRates], float | None]) -> Callable[[Sample], float | None]:
        return lambda sample: read(sample.workers[index]) if index in sample.workers else None

    def figure(number: float | None, unit: str) -> str:
        return "-" if number is None else f"{number:.1f}{unit}"

    idle = "-" if rates.gpu_idle_share is None else f"{rates.gpu_idle_share:.0%}"
    generated, prompts = rates.generated_tokens_per_s, rates.prompt_tokens_per_s
    left = [
        _Meter("generated", f"{count(generated)} tok/s", past(lambda r: r.generated_tokens_per_s)),
        _Meter("prompts", f"{count(prompts)} tok/s", past(lambda r: r.prompt_tokens_per_s)),
        _Meter("device idle", idle, past(lambda r: r.gpu_idle_share), top=1.0),
    ]
    right = [
        _Meter("step", figure(rates.step_ms, " ms"), past(lambda r: r.step_ms)),
        _Meter("rows a step", figure(rates.batch_rows, ""), past(lambda r: r.batch_rows)),
    ]
    steps = Text(f" {'one more':<12} {worker.decode_ms:.1f} ms a step, as predicted")
    if rates.draft_acceptance_share is not None:
        steps.append(f"; {rates.draft_acceptance_share:.0%} of drafts")
    return _beside(view, left, right, steps, width, glyphs)


def _beside(
    view: View,
    left: Sequence[_Meter],
    right: Sequence[_Meter],
    last: Text,
    width: int,
    glyphs: Glyphs,
) -> list[Text]:
    """Return meters in two columns with ``last`` below the right ones; in one if there is less
    room.
    """
    samples = list(view.samples)
    if width < _WIDE:
        return [_meter(meter, samples, width, _LONG_FIGURE, glyphs) for meter in (*left, *right)]
    left_width = (width - 2) * 9 // 20
    right_width = width - 2 - left_width
    beside = [*(_meter(meter, samples, right_width, _LONG_FIGURE, glyphs) for meter in right), last]
    lines = []
    for meter, other in zip(left, beside, strict=True):
        line = _meter(meter, samples, left_width, _SHORT_FIGURE, glyphs)
        lines.append(line.append("  ").append_text(other))
    return lines


def _meter(
    meter: _Meter, samples: Sequence[Sample], width: int, figure_width: int, glyphs: Glyphs
) -> Text:
    line = Text(f" {meter.name:<12} ").append(f"{meter.figure:<{figure_width}} ", style="bold")
    room = max(width - line.cell_len, 0)
    past = [meter.past(moment) for moment in samples] if len(samples) > 1 else []
    return line.append(sparkline(past, room, glyphs, meter.top), style="cyan")


def _quantiles(quantiles: Quantiles | None) -> str:
    if quantiles is None:
        return "-"
    return f"{seconds(quantiles.p50)}, p99 {seconds(quantiles.p99)}"


def _steps(rates: WorkerRates) -> str:
    facts = [f"{rates.steps_per_s:.0f}/s"]
    if rates.step_ms is not None:
        facts.append(f"{rates.step_ms:.1f} ms")
    if rates.batch_rows is not None:
        facts.append(f"{rates.batch_rows:.1f} rows")
    if rates.draft_acceptance_share is not None:
        facts.append(f"{rates.draft_acceptance_share:.0%} of drafts")
    return "  ".join(facts)


def _pages(pages: Pages, hit_share: float | None, width: int, glyphs: Glyphs) -> Text:
    line = Text(f" {'pages':<12} ")
    held, cached, free = bar(
        (pages.held, pages.cached), pages.total, max(min(width - 60, 60), 10), glyphs
    )
    line.append(held, style="green").append(cached, style="cyan").append(free, style="dim")
    line.append(f"  {count(pages.held)} held, {count(pages.cached)} cached")
    line.append(f" of {count(pages.total)}", style="dim")
    if pages.host_total:
        line.append(f", host {count(pages.host_used)} of {count(pages.host_total)}")
    if hit_share is not None:
        line.append(f", {hit_share:.0%} found")
    return line


def _requests(snapshot: Snapshot) -> Text:
    counts = snapshot.counts
    now = Text(f" {'requests':<12} ")
    now.append(f"{counts.running} running", style="bold")
    now.append(f", {counts.waiting} waiting")
    for number, name in (
        (counts.tokenizing, "tokenizing"),
        (counts.preempted, "preempted"),
        (counts.sessions, "sessions"),
    ):
        if number:
            now.append(f", {number} {name}")
    now.append(f"; {count(counts.finished_total)} ended", style="dim")
    now.append(f", {count(counts.aborted_total)} aborted", style="dim")
    now.append(
        f", {count(counts.errors_total)} failed", style="red" if counts.errors_total else "dim"
    )
    return now


def _footer(view: View, start: int, page: int, total: int, glyphs: Glyphs, width: int) -> Text:
    worker = "all" if view.chosen is None else view.chosen.index
    keys = [
        ("q", "quit"),
        ("p", "go on" if view.paused else "pause"),
        ("t", "requests" if view.show_tasks else "tasks"),
        *([] if view.show_tasks else [("s", f"sort: {view.sort}")]),
        *([("w", f"worker: {worker}")] if view.workers else []),
        (glyphs.arrows, "scroll"),
    ]
    left_out = (
        0 if view.snapshot is None or view.show_tasks else view.snapshot.num_requests_left_out
    )
    place = f"{min(start + 1, total)}-{min(start + page, total)} of {total + left_out} "
    line = Text()
    for key, meaning in keys:
        if line.cell_len + len(f" {key} {meaning} {place}") <= width:
            line.append(f" {key}", style="bold").append(f" {meaning} ")
    return line.append(place.rjust(max(width - line.cell_len, 0)), style="dim")
