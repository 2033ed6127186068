"""Measurements as one self-contained HTML page, without scripts or other files."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trioserve.load.measure import Measured
from trioserve.load.report import SPREADS, summary_rows
from trioserve.load.report_plots import Plot

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 70rem; margin: 2rem auto; \
padding: 0 1rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2rem }
table { border-collapse: collapse; margin: 1rem 0 }
th, td { border-bottom: 1px solid #ddd; padding: .3rem .8rem; text-align: right }
th:first-child, td:first-child { text-align: left }
th { background: #f5f5f5 }
img { max-width: 100%; height: auto }
figure { margin: 1rem 0 } figcaption { color: #666 }
"""


def page(
    measured: Sequence[Measured],
    drawn: Iterable[Plot],
    facts: Mapping[str, Any],
    title: str = "Benchmark",
) -> str:
    """Return the page: a table of all measurements, plots, all figures, and ``facts``.

    Args:
        measured: The measurements.
        drawn: Plots of them.
        facts: Machine, versions, options and the like. Dicts become tables.
        title: Title of the page.
    """
    parts = [f"<h1>{_text(title)}</h1>", _table(*summary_rows(measured))]
    parts += [_figure(plot) for plot in drawn]
    for one in measured:
        parts += _details(one)
    for name, value in facts.items():
        if isinstance(value, Mapping):
            parts.append(f"<h2>{_text(name)}</h2>")
            parts.append(_table(["", ""], [[str(k), _shown(v)] for k, v in value.items()]))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _details(measured: Measured) -> list[str]:
    figures = measured.figures
    name = f"{measured.series} {measured.label}".strip()
    rows = []
    for title, field in SPREADS:
        spread = getattr(figures, field)
        values = (spread.mean, spread.p50, spread.p90, spread.p99)
        rows.append([f"{title}, ms", *(f"{value:.2f}" for value in values)])
    summary = (
        f"{figures.completed} requests in {figures.duration:.1f} s, {figures.failed} failed, "
        f"{figures.cancelled} left early; {figures.prompt_tokens} tokens in and "
        f"{figures.completion_tokens} out; {figures.total_tokens_per_second:.1f} tokens/s "
        f"with prompts; at most {figures.peak_concurrency} running"
    )
    parts = [f"<h2>{_text(name)}</h2>", f"<p>{_text(summary)}</p>"]
    parts.append(_table(["", "mean", "p50", "p90", "p99"], rows))
    if figures.errors:
        errors = [[kind, str(count)] for kind, count in figures.errors.items()]
        parts.append(_table(["error", "requests"], errors))
    return parts


def _figure(plot: Plot) -> str:
    data = base64.b64encode(plot.png()).decode()
    return (
        f'<figure><img alt="{_text(plot.title)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{_text(plot.title)}</figcaption></figure>"
    )


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{_text(title)}</th>" for title in titles)
    lines = ["<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    return f"<table><tr>{head}</tr>\n" + "\n".join(lines) + "</table>"


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


def _text(text: str) -> str:
    return html.escape(text, quote=True)
