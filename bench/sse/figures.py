"""What was measured of one server at one number of streams, and the table of it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs

from bench.goals import Verdict
from bench.report import machine

__all__ = ["Window", "ratios", "save", "table", "verdicts"]


@attrs.frozen(kw_only=True)
class Window:
    """Some seconds of one server. ``cpu_seconds`` are the server's, ``seconds`` the wall's."""

    server: str
    round: int
    streams: int
    events: int
    tokens: int
    seconds: float
    cpu_seconds: float

    @property
    def microseconds(self) -> float:
        """CPU time for each event."""
        return self.cpu_seconds / self.events * 1e6

    @property
    def line(self) -> str:
        """For somebody who watches."""
        return (
            f"round {self.round}, {self.streams:4} streams, {self.server:26} "
            f"{self.microseconds:6.1f} us, {self.events / self.seconds:7.0f} events/s, "
            f"{self.tokens / self.events:.2f} tokens each"
        )


def ratios(windows: Sequence[Window]) -> dict[str, dict[int, float]]:
    """The first server's CPU time per event by each other's: the median of the rounds' ratios."""
    first = windows[0].server
    found: dict[str, dict[int, float]] = {}
    for server in dict.fromkeys(window.server for window in windows):
        if server != first:
            found[server] = {
                streams: statistics.median(
                    ours.microseconds / theirs.microseconds
                    for ours, theirs in zip(
                        _of(windows, first, streams), _of(windows, server, streams), strict=True
                    )
                )
                for streams in sorted({window.streams for window in windows})
            }
    return found


def verdicts(windows: Sequence[Window]) -> list[Verdict]:
    """What an event costs at 256 streams beside uvicorn with h11, and what it may."""
    streams = 256
    found = ratios(windows).get("uvicorn h11", {})
    if streams not in found:
        return []
    what = f"µs of CPU per SSE event, {streams} streams"
    return [
        Verdict(
            what=what,
            against="uvicorn with h11",
            bound=1.3,
            reached=found[streams],
            at_most=True,
            moonshot=1.0,
        )
    ]


def table(windows: Sequence[Window]) -> str:
    """A Markdown table: the median of the rounds, their spread, and the ratios."""
    first, found = windows[0].server, ratios(windows)
    lines = [
        f"| streams | server | µs of CPU per event | least to most | {first} / this | events/s "
        "| tokens per event |",
        "|---|---|---|---|---|---|---|",
    ]
    for streams in sorted({window.streams for window in windows}):
        for server in dict.fromkeys(window.server for window in windows):
            own = _of(windows, server, streams)
            rounds = [window.microseconds for window in own]
            cells = [
                str(streams),
                server,
                f"{statistics.median(rounds):.1f}",
                f"{min(rounds):.1f} to {max(rounds):.1f}",
                f"{found[server][streams]:.2f}" if server in found else "",
                f"{statistics.median(w.events / w.seconds for w in own):.0f}",
                f"{statistics.median(w.tokens / w.events for w in own):.2f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def save(folder: Path, windows: Sequence[Window], facts: Mapping[str, Any]) -> Path:
    """Write everything to ``folder/sse-<time>.json`` and return its path."""
    now = datetime.now(UTC)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"sse-{now:%Y%m%d-%H%M%S}.json"
    result = {
        "time": now.isoformat(timespec="seconds"),
        "machine": machine(),
        **facts,
        "windows": [attrs.asdict(window) for window in windows],
    }
    path.write_text(json.dumps(result, indent=2) + "\n")
    return path


def _of(windows: Sequence[Window], server: str, streams: int) -> list[Window]:
    chosen = [w for w in windows if w.server == server and w.streams == streams]
    return sorted(chosen, key=lambda window: window.round)
