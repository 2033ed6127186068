"""Figures on a page: they come from results, and from nowhere else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from bench.all_figures import new_results
from bench.goals import Verdict
from bench.performance_page import blocks_of, filled, main, with_pictures
from bench.rows import Row

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
MACHINE = {"cores": 2, "processor": "P", "memory_gib": 23.5, "system": "Linux"}


def comparison(rate: float, failures: list[str] | None = None, day: int = 1) -> dict[str, Any]:
    rows = [
        Row(
            scenario="throughput",
            case="1 stream",
            server=server,
            format="bf16",
            round=0,
            values={"tokens_per_second": value, "ttft_p50_ms": 9.0, "elsewhere_cores": 0.04},
        )
        for server, value in (("trioserve", rate), ("llama.cpp", 100.0))
    ]
    return {
        "time": f"2026-01-0{day}T00:00:00+00:00",
        "machine": MACHINE,
        "servers": {"llama.cpp bf16": {"sdist": "x==1", "started_with": "--threads 2"}},
        "failures": failures or [],
        "measurements": [attrs.asdict(row) for row in rows],
    }


def other(reached: float) -> dict[str, Any]:
    verdict = Verdict(
        what="CPU per event", against="uvicorn", bound=1.3, reached=reached, at_most=True
    )
    return {
        "time": "2026-01-02",
        "machine": MACHINE,
        "table": "| events |",
        "verdicts": [attrs.asdict(verdict)],
    }


def test_a_block_is_replaced_and_the_rest_of_the_page_is_kept() -> None:
    page = (
        "a\n<!-- figures: one -->\nold\n<!-- end -->\nb\n<!-- figures: two -->\nc\n<!-- end -->\n"
    )
    once = filled(page, {"one": "new"})
    assert once == page.replace("\nold\n", "\n\nnew\n\n")
    assert filled(once, {"one": "new"}) == once
    with pytest.raises(ValueError, match="no place for three"):
        filled(page, {"three": "new"})


def test_tables_targets_and_machines_come_from_the_results() -> None:
    results = {
        "compare-20260101-000000.json": comparison(120.0, ["vllm didn't start"]),
        "sse-20260101-000000.json": other(1.2),
    }
    blocks = blocks_of(results)
    assert "| 1 stream | trioserve bf16 | 1 | 120.0 |" in blocks["throughput"]
    assert "compare-20260101-000000.json" in blocks["throughput"]
    assert "| 1 stream, tokens/s | llama.cpp bf16 | ≥ 1.05 times | 1.2 times |" in blocks["targets"]
    assert "| CPU per event | uvicorn | ≤ 1.3 times | 1.2 times | reached |" in blocks["targets"]
    assert blocks["sse"].startswith("| events |")
    assert "2 cores of P, 23.5 GiB | Linux | 0.04 | 1 |" in blocks["machine"]
    assert "| llama.cpp bf16 | sdist x==1 |" in blocks["machine"]
    assert "missed" not in blocks["targets"]
    assert blocks["missed"].startswith("None")


def test_targets_of_a_busy_machine_decide_nothing() -> None:
    result = comparison(120.0)
    assert "quiet" not in blocks_of({"compare-1.json": result})["targets"]
    for measurement in result["measurements"]:
        measurement["values"]["elsewhere_cores"] = 0.5
    targets = blocks_of({"compare-1.json": result})["targets"]
    assert targets.startswith("**The machine wasn't quiet**: 0.50 cores")


def test_of_two_results_of_one_scenario_the_later_one_counts() -> None:
    results = {
        "compare-20260102-000000.json": comparison(90.0, day=2),
        "throughput-20260101-000000.json": comparison(120.0, day=1),
    }
    blocks = blocks_of(results)
    assert "| 90.0 |" in blocks["throughput"]
    assert "120.0" not in blocks["throughput"]
    assert "1 stream, tokens/s" in blocks["missed"]


def test_a_file_that_holds_no_figures_is_refused() -> None:
    with pytest.raises(ValueError, match="holds neither"):
        blocks_of({"other-1.json": {"time": "", "machine": MACHINE}})


def test_only_new_results_are_put_into_the_page(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("")
    before = set(tmp_path.iterdir())
    for name in ("new.json", "new.png"):
        (tmp_path / name).write_text("")
    assert new_results(tmp_path, before) == [tmp_path / "new.json"]


def test_the_page_has_a_place_for_everything(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    names = ["compare", "sse", "front-end", "micro"]
    paths = [tmp_path / f"{name}-20260101-000000.json" for name in names]
    for name, path in zip(names, paths, strict=True):
        path.write_text(json.dumps(comparison(120.0) if name == "compare" else other(1.0)))
    arguments = [*map(str, paths), "--page", str(page)]
    assert main(arguments) == 0
    filled_in = page.read_text()
    assert "| 120.0 |" in filled_in
    # What wasn't measured this time stays as it is.
    memory = PAGE.read_text().partition("<!-- figures: memory -->")[2].partition("<!-- end -->")[0]
    assert memory in filled_in
    assert main(arguments) == 0
    assert page.read_text() == filled_in


def test_pictures_are_copied_and_shown_beside_their_figures(tmp_path: Path) -> None:
    compare, micro = (tmp_path / f"{name}-20260101-000000.json" for name in ("compare", "micro"))
    compare.with_suffix("").mkdir()
    (compare.with_suffix("") / "throughput-bf16-load.png").write_bytes(b"load")
    (compare.with_suffix("") / "rates-bf16-load.png").write_bytes(b"not on the page")
    micro.with_suffix(".png").write_bytes(b"cost")
    folder = tmp_path / "pictures"
    shown = with_pictures({"throughput": "rows", "micro": "us"}, [compare, micro], folder)
    assert shown["throughput"] == (
        "rows\n\n![throughput-bf16-load](pictures/throughput-bf16-load.png)"
    )
    assert shown["micro"] == "us\n\n![micro](pictures/micro.png)"
    assert sorted(path.name for path in folder.iterdir()) == [
        "micro.png",
        "throughput-bf16-load.png",
    ]
