"""The lower part of the drawing: the requests as a table, or the tasks as a tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs
from rich.text import Text

from trioserve.cli.top.glyphs import Glyphs, bar, count, duration
from trioserve.cli.top.view import View, arrival_of
from trioserve.observability.live.schema import RequestRow, TaskNode
from trioserve.protocol.errors import printable

_STATE_STYLES = {
    "decode": "green",
    "prefill": "cyan",
    "waiting": "yellow",
    "preempted": "magenta",
    "finished": "dim",
}
_REASON_STYLES = {"abort": "yellow", "error": "red"}
_MIN_ID = 12
_MAX_ID = 40


@attrs.frozen(kw_only=True)
class _Cells:
    """Cells of one request's row."""

    row: RequestRow
    now: float
    speed: float | None
    glyphs: Glyphs

    def state(self) -> str:
        return self.row.finish_reason or self.row.state

    def age(self) -> str:
        row = self.row
        ended = row.timeline[-1][1] if row.state == "finished" and row.timeline else self.now
        return duration(ended - arrival_of(row))

    def done(self) -> str:
        row = self.row
        if row.state == "prefill":
            part, whole = row.computed_tokens, row.prompt_tokens
            return "".join(bar((0, part), whole, 8, self.glyphs))
        return "".join(bar((row.output_tokens,), row.max_tokens or 0, 8, self.glyphs))

    def tokens_per_second(self) -> str:
        return "" if self.speed is None else f"{self.speed:.1f}"

    def adapter(self) -> str:
        return printable(self.row.adapter or "")


@attrs.frozen(kw_only=True)
class _Column:
    title: str
    width: int
    cell: Callable[[_Cells], str]
    rank: int
    """In a narrow terminal, columns with the highest rank are left out first."""
    left: bool = False
    wanted: Callable[[View], bool] = lambda view: True
    """Returns True if the view needs the column."""


_COLUMNS = (
    _Column(title="STATE", width=10, cell=_Cells.state, rank=0, left=True),
    _Column(title="AGE", width=7, cell=_Cells.age, rank=1),
    _Column(title="PROMPT", width=6, cell=lambda cells: count(cells.row.prompt_tokens), rank=3),
    _Column(title="CACHED", width=6, cell=lambda cells: count(cells.row.cached_tokens), rank=7),
    _Column(title="OUTPUT", width=6, cell=lambda cells: count(cells.row.output_tokens), rank=2),
    _Column(title="DONE", width=8, cell=_Cells.done, rank=5, left=True),
    _Column(title="TOK/S", width=6, cell=_Cells.tokens_per_second, rank=6),
    _Column(title="PAGES", width=5, cell=lambda cells: count(cells.row.pages), rank=8),
    _Column(
        title="WORKER",
        width=6,
        cell=lambda cells: "" if cells.row.worker is None else str(cells.row.worker),
        rank=4,
        wanted=lambda view: bool(view.workers) and view.chosen is None,
    ),
    _Column(
        title="MOVES",
        width=5,
        cell=lambda cells: str(cells.row.moves or ""),
        rank=9,
        wanted=lambda view: any(row.moves for row in view.rows),
    ),
    _Column(
        title="PRIORITY",
        width=8,
        cell=lambda cells: str(cells.row.priority),
        rank=10,
        wanted=lambda view: any(row.priority for row in view.rows),
    ),
    _Column(
        title="ADAPTER",
        width=12,
        cell=_Cells.adapter,
        rank=11,
        left=True,
        wanted=lambda view: any(row.adapter for row in view.rows),
    ),
)


def request_lines(view: View, width: int, glyphs: Glyphs) -> tuple[Text, list[Text]]:
    """Return the table's head and a line for each request."""
    rows = view.rows
    wanted = [column for column in _COLUMNS if column.wanted(view)]
    columns, id_width = _fit(wanted, width)
    titles = ["REQUEST".ljust(id_width), *(_aligned(column, column.title) for column in columns)]
    head = Text(" ".join(titles).ljust(width)[:width], style="reverse")
    snapshot = view.snapshot
    if snapshot is None:
        return head, []
    lines = []
    for row in rows:
        cells = _Cells(row=row, now=snapshot.now, speed=view.speeds.get(row.id), glyphs=glyphs)
        style = _REASON_STYLES.get(row.finish_reason or "") or _STATE_STYLES.get(row.state, "")
        name = printable(row.id)
        line = Text(name[:id_width].ljust(id_width), style="dim" if row.finish_reason else "")
        for column in columns:
            cell = _aligned(column, column.cell(cells))
            line.append(" " + cell, style=style if column.title == "STATE" else "")
        lines.append(line)
    return head, lines


def _fit(columns: list[_Column], width: int) -> tuple[list[_Column], int]:
    """Return the ``columns`` that fit, and the width left for the request's id."""
    while columns and _MIN_ID + sum(column.width + 1 for column in columns) > width:
        worst = max(columns, key=lambda column: column.rank)
        columns = [column for column in columns if column is not worst]
    left = width - sum(column.width + 1 for column in columns)
    return columns, min(max(left, 1), _MAX_ID)


def _aligned(column: _Column, text: str) -> str:
    text = text[: column.width]
    return text.ljust(column.width) if column.left else text.rjust(column.width)


def task_lines(view: View, width: int, glyphs: Glyphs) -> tuple[Text, list[Text]]:
    """Return the tree's head and a line for each node."""
    head = Text("TASKS".ljust(width)[:width], style="reverse")
    snapshot = view.snapshot
    return head, [] if snapshot is None else list(_tree(snapshot.tasks, "", "", glyphs))


def _tree(node: TaskNode, first: str, further: str, glyphs: Glyphs) -> Iterator[Text]:
    """Yield the line of ``node`` with prefix ``first``, and its children's with ``further``."""
    line = Text(first, style="dim")
    line.append(printable(node.name), style="")
    if node.count > 1:
        line.append(f" x{node.count}", style="bold")
    if node.state:
        line.append(f" {node.state}", style="dim")
    if node.num_left_out:
        line.append(f" ({node.num_left_out} more below)", style="dim")
    yield line
    for child in node.children:
        last = child is node.children[-1]
        yield from _tree(
            child,
            further + (glyphs.last_branch if last else glyphs.branch),
            further + ("   " if last else glyphs.trunk),
            glyphs,
        )
