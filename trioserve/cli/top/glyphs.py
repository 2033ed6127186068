"""Bars, sparklines and numbers of a given width."""

from __future__ import annotations

from collections.abc import Sequence

import attrs


@attrs.frozen(kw_only=True)
class Glyphs:
    """Characters for drawing, distinct without colors."""

    levels: str
    """Levels of a sparkline, lowest first."""
    fills: str
    """Fills of a bar: its first part, its second, and the empty rest."""
    branch: str
    last_branch: str
    trunk: str
    arrows: str


UNICODE = Glyphs(
    levels="▁▂▃▄▅▆▇█", fills="█▒░", branch="├─ ", last_branch="└─ ", trunk="│  ", arrows="↑↓"
)
ASCII = Glyphs(
    levels="_.-:=+*#", fills="#+.", branch="|- ", last_branch="`- ", trunk="|  ", arrows="up/down"
)
"""Glyphs for a terminal without UTF-8."""


def sparkline(
    values: Sequence[float | None], width: int, glyphs: Glyphs, top: float | None = None
) -> str:
    """Return the newest ``width`` of ``values`` as a line, with a gap for None.

    The highest level is ``top``, by default the largest value.
    """
    shown = values[-width:] if width > 0 else []
    if top is None:
        top = max((value for value in shown if value is not None), default=0.0)
    last = len(glyphs.levels) - 1
    drawn = (
        " "
        if value is None
        else glyphs.levels[round(max(min(value / top, 1.0), 0.0) * last) if top > 0 else 0]
        for value in shown
    )
    return "".join(drawn).rjust(width)


def bar(parts: Sequence[float], whole: float, width: int, glyphs: Glyphs) -> list[str]:
    """Return the parts of ``whole`` and the rest as strings with ``width`` characters in all.

    A part above 0 gets at least one character if there is room.
    """
    runs: list[str] = []
    left = width
    for part, fill in zip(parts, glyphs.fills, strict=False):
        share = min(part / whole, 1.0) if whole > 0 else 0.0
        size = min(max(round(share * width), 1 if part > 0 else 0), left)
        runs.append(fill * size)
        left -= size
    return [*runs, glyphs.fills[-1] * left]


def count(number: float) -> str:
    """Return a count in about 5 characters: ``950``, ``12.3k``, ``4.5M``."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= limit:
            scaled = number / (1e3 if unit == "k" else limit)
            return f"{scaled:.0f}{unit}" if scaled >= 100 else f"{scaled:.1f}{unit}"
    return f"{number:.0f}"


def seconds(time: float | None) -> str:
    """Return a short time: ``61 ms``, ``1.25 s``, ``0.4 ms``."""
    if time is None:
        return "-"
    if time >= 0.9995:
        return f"{time:.0f} s" if time >= 100 else f"{time:.2f} s"
    milliseconds = time * 1000
    return f"{milliseconds:.1f} ms" if milliseconds < 9.95 else f"{milliseconds:.0f} ms"


def duration(time: float) -> str:
    """Return a long time: ``7s``, ``12:33``, ``1:02:33``, ``3d 04:12``."""
    whole = max(0, int(time))
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours_of_day = divmod(hours, 24)
    if days:
        return f"{days}d {hours_of_day:02}:{minutes:02}"
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{rest}s"
