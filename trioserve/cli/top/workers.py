"""The workers in the drawing: a line about all of them, a line for each, and one alone."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from trioserve.cli.top.glyphs import Glyphs, bar, count, duration
from trioserve.observability.live.schema import Hello, Snapshot, WorkerRow
from trioserve.protocol.errors import printable

STATE_STYLES = {
    "running": "green",
    "starting": "cyan",
    "draining": "cyan",
    "released": "yellow",
}
"""Styles of states; all others are trouble."""
_TROUBLE = "red"
_BAR = 10
_NOTED = 76
"""Columns from which lines have a bar of pages, and notes."""


def is_in_trouble(worker: WorkerRow) -> bool:
    """Return True if the worker should compute, and doesn't."""
    return worker.state not in STATE_STYLES


def workers_line(hello: Hello, snapshot: Snapshot) -> Text:
    """Return the line about all workers, which names each one in trouble."""
    workers = snapshot.workers
    running = sum(each.state == "running" for each in workers)
    line = Text(f" {'workers':<12} ")
    style = "green" if running == len(workers) else "yellow"
    line.append(f"{running} of {len(workers)} running", style=style)
    for worker in workers:
        if is_in_trouble(worker):
            reason = f" ({printable(worker.last_loss)})" if worker.last_loss else ""
            line.append(
                f"; worker {worker.index} {_note(worker, snapshot.now)}{reason}", style=_TROUBLE
            )
    return line.append_text(front_ends(hello))


def front_ends(hello: Hello) -> Text:
    """Return the number of front ends, if there are several."""
    return Text(f"; {hello.front_ends} front ends" if hello.front_ends > 1 else "", style="dim")


def worker_line(worker: WorkerRow, now: float) -> Text:
    """Return the line about the worker that is looked at alone."""
    line = Text(f" {f'worker {worker.index}':<12} ")
    line.append(printable(worker.state), style=STATE_STYLES.get(worker.state, _TROUBLE))
    line.append(processes_of(worker.pid, worker.rank_pids))
    line.append(f" for {duration(now - worker.since)}")
    if worker.restarts:
        line.append(f", {restarts_of(worker.restarts, worker.last_loss)}", style="yellow")
    line.append(f"  {printable(worker.device)}", style="dim")
    if worker.host is not None:
        trip, size = _round_trip(worker), _plan_bytes(worker)
        away = f" on {printable(worker.host)}: round trip {trip} ms, {size} bytes a plan"
        line.append(away, style="dim")
    return line


def processes_of(pid: int | None, rank_pids: Sequence[int]) -> str:
    """Return the process ids of a worker, if it has any here."""
    return "" if pid is None else " as " + ", ".join(map(str, (pid, *rank_pids)))


def restarts_of(restarts: int, last_loss: str | None) -> str:
    """Return a number of restarts, and the reason of the last one."""
    reason = f" ({printable(last_loss)})" if last_loss else ""
    return f"{restarts} {'restart' if restarts == 1 else 'restarts'}{reason}"


def worker_lines(snapshot: Snapshot, width: int, most: int, glyphs: Glyphs) -> list[Text]:
    """Return a head and at most ``most`` lines of workers, those in trouble before others."""
    workers = snapshot.workers
    order = sorted(workers, key=lambda each: (not is_in_trouble(each), each.index))
    shown = order if len(order) <= most else order[: max(most - 1, 1)]
    has_drafts = any(each.rates.draft_acceptance_share is not None for each in workers)
    has_hosts = any(each.host is not None for each in workers)
    noted = width >= _NOTED
    titles = f" {'WORKER':>6} {'STATE':<10} {'RUN':>4} {'WAIT':>4} {'PAGES':>5}"
    titles += f" {'':<{_BAR}}" if noted else ""
    titles += f" {'MS/STEP':>7} {'TOK/S':>6}{' DRAFTS' if has_drafts else ''}"
    titles += f" {'B/PLAN':>6} {'MS/TRIP':>7}" if has_hosts else ""
    lines = [Text(titles, style="dim")]
    for worker in sorted(shown, key=lambda each: each.index):
        line = _worker_line(worker, noted, has_drafts, glyphs)
        if has_hosts:
            line.append(f" {_plan_bytes(worker):>6} {_round_trip(worker):>7}")
        if noted:
            line.append(f"  {_note(worker, snapshot.now)}")
        if is_in_trouble(worker):
            line.stylize(_TROUBLE)
        lines.append(line)
    if len(shown) < len(order):
        lines.append(Text(f" {len(order) - len(shown)} more: {_states(order[len(shown) :])}"))
    return lines


def _worker_line(worker: WorkerRow, noted: bool, has_drafts: bool, glyphs: Glyphs) -> Text:
    pages, rates = worker.pages, worker.rates
    line = Text(f" {worker.index:>6} ")
    line.append(f"{printable(worker.state)[:10]:<10}", style=STATE_STYLES.get(worker.state, ""))
    line.append(f" {worker.running:>4} {worker.waiting:>4}")
    line.append(f" {f'{pages.held / pages.total:.0%}' if pages.total else '-':>5}")
    if noted:
        held, cached, free = bar((pages.held, pages.cached), pages.total, _BAR, glyphs)
        line.append(" ").append(held, style="green").append(cached, style="cyan")
        line.append(free, style="dim")
    line.append(f" {'-' if rates.step_ms is None else f'{rates.step_ms:.1f}':>7}")
    line.append(f" {count(rates.generated_tokens_per_s):>6}")
    if has_drafts:
        share = rates.draft_acceptance_share
        line.append(f" {'' if share is None else f'{share:.0%}':>6}")
    return line


def _plan_bytes(worker: WorkerRow) -> str:
    return "-" if worker.plan_bytes is None else count(worker.plan_bytes)


def _round_trip(worker: WorkerRow) -> str:
    return "-" if worker.round_trip_ms is None else f"{worker.round_trip_ms:.1f}"


def _note(worker: WorkerRow, now: float) -> str:
    """Return the state in words, with its time, if it isn't the usual one; or the restarts."""
    past = duration(now - worker.since)
    if worker.state == "restarting":
        return f"lost {past} ago"
    if worker.state == "ended":
        return f"given up {past} ago"
    if worker.state == "stalled":
        return "stalled: a step doesn't end"
    if worker.state != "running":
        return ""
    return f"{restarts_of(worker.restarts, None)}, the last {past} ago" if worker.restarts else ""


def _states(workers: Sequence[WorkerRow]) -> str:
    """Return how many workers are in each state."""
    states = [printable(each.state) for each in workers]
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
