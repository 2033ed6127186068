"""Reports of measurements: text, JSON, plots, and a page that needs nothing else."""

from __future__ import annotations

import html.parser
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import trio

from trioserve.load import Limits, Progress, Record, Run, figures_of
from trioserve.load.measure import Measured
from trioserve.load.progress import ProgressBar
from trioserve.load.report import as_json, environment, figures_text, summary_text
from trioserve.load.report_html import page
from trioserve.load.report_plots import (
    distribution_plot,
    load_plot,
    plots,
    save_plots,
    timeline_plot,
)


def measured(
    label: str = "2 streams",
    *,
    concurrency: int | None = 2,
    rate: float | None = None,
    failed: bool = True,
    series: str = "",
    slower: float = 1.0,
) -> Measured:
    records = [
        Record(
            started=100.0 + n,
            chunks=[100.0 + n + slower * t for t in (0.1, 0.2, 0.4)],
            first_text=100.1 + n,
            text="abc",
            prompt_tokens=10,
            completion_tokens=3,
            cached_tokens=5,
            ended=100.4 + n,
            scheduled=None if rate is None else 100.0 + n - 0.02,
            valid=n == 0,
        )
        for n in range(4)
    ]
    if failed:
        records += [
            Record(started=104.0, error="HTTP 429: full", error_kind="HTTP 429", ended=104.1),
            Record(started=104.0, error="HTTP 429: full", error_kind="HTTP 429", ended=104.1),
            Record(started=104.0, error="<b>lost</b>", error_kind="connection lost", ended=104.1),
        ]
    records.append(Record(started=104.0, chunks=[104.1], cancelled=True, ended=104.1))
    run = Run(concurrency=concurrency, rate=rate, records=records, duration=5.0, started=100.0)
    return Measured(label=label, run=run, figures=figures_of(run, Limits(ttft=200)), series=series)


FACTS = {
    "tool": "trioserve bench",
    "machine": {"processor": "A & B <x>", "cores": 2.0},
    "options": {"url": "http://127.0.0.1:8000", "goodput": ("ttft:200",), "model": None},
}


def test_the_text_says_what_there_is_to_say() -> None:
    lines = figures_text(measured(rate=3.0, concurrency=None, label="3 requests/s")).splitlines()
    assert lines == [
        "3 requests/s: 4 requests in 5.0 s, 3 failed, 1 left early",
        "  0.80 requests/s, 2.4 tokens/s out, 10.4 with prompts; at most 1 running",
        "  goodput: 0.80 requests/s within the limits",
        "  25.0% of the answers that ended by themselves are valid",
        "  50.0% of the prompts' tokens were cached",
        "  the client sent late: 20.0 ms at p99",
        "  ms                 mean        p50        p90        p99",
        "  TTFT             100.00     100.00     100.00     100.00",
        "  first text       100.00     100.00     100.00     100.00",
        "  ITL              150.00     150.00     200.00     200.00",
        "  TPOT             150.00     150.00     150.00     150.00",
        "  E2E              400.00     400.00     400.00     400.00",
        "  2 x HTTP 429: HTTP 429: full",
        "  1 x connection lost: <b>lost</b>",
    ]


def test_a_wait_before_the_bound_is_not_laid_to_the_client() -> None:
    lines = figures_text(measured(rate=3.0, concurrency=2)).splitlines()
    assert "  waited before the bound: 20.0 ms at p50, 20.0 ms at p99" in lines
    assert "the client sent late" not in "".join(lines)


def test_requests_that_were_sent_again_are_told() -> None:
    one = measured()
    assert "sent again" not in figures_text(one)
    for record in one.run.records[:2]:
        record.resent = True
    one = attrs.evolve(one, figures=figures_of(one.run))
    told = "  sent again, as the server closed the connection without an answer: 2"
    assert told in figures_text(one).splitlines()
    (run,) = json.loads(as_json([one], {}, records=True))["runs"]
    assert run["figures"]["resent"] == 2
    assert [record["resent"] for record in run["records"][:3]] == [True, True, False]


def test_a_run_of_failures_is_told_without_times() -> None:
    failed = [Record(started=0.0, error="no", ended=0.1)]
    run = Run(concurrency=1, records=failed, duration=1.0)
    text = figures_text(Measured(label="1 stream", run=run, figures=figures_of(run)))
    assert text.splitlines()[2:] == ["  1 x other: no"]
    assert "nan" not in text


def test_the_summary_has_a_row_for_each_measurement() -> None:
    plain = [
        attrs.evolve(one, figures=figures_of(one.run))
        for one in (measured("1 stream"), measured("32 streams", failed=False))
    ]
    titles, first, second = summary_text(plain).splitlines()
    assert re.split(r"  +", titles) == [
        *("load", "failed", "requests/s", "tokens/s out", "TTFT p50 · p99 ms"),
        *("ITL p50 · p99 ms", "TPOT p50 ms", "E2E p50 ms"),
    ]
    assert re.split(r"  +", first) == [
        *("1 stream", "3", "0.80", "2.4", "100.0 · 100.0", "150.00 · 200.00", "150.00", "400.0")
    ]
    assert second.split("  ")[0] == "32 streams"
    assert len(titles) == len(first) == len(second)
    titles, row = summary_text([measured(series="ours")]).splitlines()
    assert re.split(r"  +", titles)[:2] == ["server", "load"]
    assert titles.endswith("goodput/s")
    assert re.split(r"  +", row)[0] == "ours"


def test_json_has_everything_and_no_number_that_is_none() -> None:
    one = measured()
    whole = json.loads(as_json([one], FACTS), parse_constant=lambda name: pytest.fail(name))
    assert whole["machine"]["cores"] == 2
    (run,) = whole["runs"]
    assert run["label"] == "2 streams"
    assert run["figures"]["errors"] == {"HTTP 429": 2, "connection lost": 1}
    assert run["figures"]["itl_ms"]["p90"] == pytest.approx(200)
    assert set(run["figures"]) == {field.name for field in attrs.fields(type(one.figures))}
    assert "records" not in run
    assert "series" not in run
    failed = [Record(started=0.0, error="no", ended=0.1)]
    nothing = Run(concurrency=1, records=failed, duration=1.0)
    empty = Measured(label="x", run=nothing, figures=figures_of(nothing), series="ours")
    (run,) = json.loads(as_json([empty], {}))["runs"]
    assert run["figures"]["ttft_ms"] == {"mean": None, "p50": None, "p90": None, "p99": None}
    assert run["series"] == "ours"


def test_records_are_told_on_request_from_the_runs_beginning() -> None:
    (run,) = json.loads(as_json([measured(rate=3.0)], {}, records=True))["runs"]
    second = run["records"][1]
    assert (second["started"], second["scheduled"], second["ended"]) == (1.0, 0.98, 1.4)
    assert second["chunks"] == [1.1, 1.2, 1.4]
    assert (second["first_text"], second["text"]) == (1.1, "abc")
    assert len(run["records"]) == 8
    assert run["records"][4]["error_kind"] == "HTTP 429"
    assert run["records"][4]["first_text"] is None


def test_the_environment_names_machine_and_versions() -> None:
    facts = environment("tokenizers", "no-such-package")
    assert facts["machine"]["cores"] > 0
    assert facts["machine"]["memory_bytes"] > 1 << 20
    assert set(facts["versions"]) == {"trioserve", "python", "trio", "msgspec", "tokenizers"}


# -- plots


def curve(one: Measured, what: str) -> tuple[list[float], list[float]]:
    (line,) = distribution_plot([one], what, "x").figure.axes[0].get_lines()
    return list(np.asarray(line.get_xdata())), list(np.asarray(line.get_ydata()))


def test_distributions_show_every_value_of_the_answers_alone() -> None:
    times, shares = curve(measured(), "itl")
    assert times == pytest.approx([100.0] * 4 + [200.0] * 4)
    assert shares == pytest.approx([n / 8 for n in range(1, 9)])
    times, _ = curve(measured(), "ttft")
    assert times == pytest.approx([100.0] * 4)


def test_a_timeline_shows_who_runs_and_how_many_events_come() -> None:
    above, below = timeline_plot(measured()).figure.axes
    (line,) = above.get_lines()
    at = dict(zip(np.asarray(line.get_xdata()), np.asarray(line.get_ydata()), strict=True))

    def running(time: float) -> float:
        return float(at[max(known for known in at if known <= time)])

    assert (running(0.2), running(0.5), running(1.3), running(4.05)) == (1, 0, 1, 4)
    (line,) = below.get_lines()
    rates = np.asarray(line.get_ydata(), dtype=float)
    step = float(np.diff(np.asarray(line.get_xdata(), dtype=float))[0])
    assert rates.sum() * step == pytest.approx(13)  # all events, also of the client that left


def test_latency_is_drawn_against_concurrency_a_line_for_each_server() -> None:
    both = [
        measured(f"{n} streams", concurrency=n, series=series, slower=slower)
        for series, slower in (("ours", 1.0), ("peer", 2.0))
        for n in (32, 1, 8)
    ]
    plot = load_plot(both)
    ttft, itl, e2e, throughput = plot.figure.axes
    labels = [line.get_label() for line in ttft.get_lines()]
    assert labels == ["ours p50", "ours p99", "peer p50", "peer p99"]
    for axes, value in ((ttft, 200), (itl, 300), (e2e, 800)):
        peer = axes.get_lines()[2]
        assert list(np.asarray(peer.get_xdata())) == [1, 8, 32]
        assert list(np.asarray(peer.get_ydata())) == pytest.approx([value] * 3)
    assert [line.get_label() for line in throughput.get_lines()] == ["ours", "peer"]
    assert plot.title == "Latency and throughput against concurrency"
    assert ttft.get_xscale() == "log"
    by_rate = [measured(f"{r} requests/s", rate=r, concurrency=None) for r in (1.0, 2.0)]
    plot = load_plot(by_rate)
    assert plot.title == "Latency and throughput against request rate"
    assert list(np.asarray(plot.figure.axes[0].get_lines()[0].get_xdata())) == [1, 2]
    assert plot.figure.axes[0].get_xscale() == "linear"


def test_there_is_a_plot_against_load_only_for_a_sweep() -> None:
    failed = Run(concurrency=4, records=[Record(started=0.0, error="x", ended=1.0)], duration=1.0)
    nothing = Measured(label="4 streams", run=failed, figures=figures_of(failed))
    assert [plot.name for plot in plots([measured(), nothing])] == [
        "ttft", "itl", "timeline-2-streams"
    ]  # fmt: skip
    assert list(plots([nothing])) == []
    sweep = [measured(), measured("8 streams", concurrency=8)]
    assert next(plots(sweep)).name == "load"


def test_plots_are_saved_as_png(tmp_path: Path) -> None:
    paths = save_plots(plots([measured()]), tmp_path / "new" / "plots")
    assert [path.name for path in paths] == ["ttft.png", "itl.png", "timeline-2-streams.png"]
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")


class _Page(html.parser.HTMLParser):
    """The attributes and the text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href", "srcset")]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_needs_nothing_else() -> None:
    both = [measured(series="<us>"), measured("8 streams", concurrency=8)]
    text = page(both, plots(both), FACTS, "A < B")
    read = _Page()
    read.feed(text)
    assert {"script", "link", "iframe", "b"}.isdisjoint(read.tags)
    assert len(read.links) == read.tags.count("img") == 5
    assert all(link.startswith("data:image/png;base64,") for link in read.links)
    assert re.search(r"@import|url\(", text) is None
    shown = " ".join(read.text)
    for wanted in ("A < B", "<us>", "A & B <x>", "ttft:200", "HTTP 429", "10.4 tokens/s"):
        assert wanted in shown
    assert "100.0 · 100.0" in shown


def test_without_an_answer_there_is_a_page_without_plots() -> None:
    failed = Run(concurrency=1, records=[Record(started=0.0, error="x", ended=1.0)], duration=1.0)
    one = Measured(label="1 stream", run=failed, figures=figures_of(failed))
    assert math.isnan(one.figures.ttft_ms.p50)
    assert "<img" not in page([one], plots([one]), {})


# -- progress


async def test_progress_is_shown_on_a_terminal_alone(
    autojump_clock: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def follow() -> str:
        progress = Progress(total=4)
        record = Record(started=trio.current_time())
        progress.begin(record)
        with ProgressBar("8 streams", progress) as bar:
            with trio.move_on_after(2.1):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(bar.follow)
                    await trio.sleep(1.0)
                    record.chunks += [1.0] * 100
                    record.fail("lost", "lost")
                    progress.end(record)
                    await trio.sleep_forever() if bar._bar else nursery.cancel_scope.cancel()
        return capsys.readouterr().err

    assert await follow() == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    shown = await follow()
    for wanted in ("8 streams", "1/4", "0 running", "1 failed", "tokens/s"):
        assert wanted in shown
