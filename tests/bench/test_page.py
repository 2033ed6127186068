"""Figures on a page: they come from results, and from nowhere else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from bench.all_figures import new_results
from bench.goals import Verdict
from bench.performance_page import blocks_of, filled, main, sources_of, sources_on
from bench.readme_figures import figures
from bench.rows import Row

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
MACHINE = {"cores": 2, "processor": "P", "memory_gib": 23.5, "system": "Linux"}


def comparison(
    rate: float, failures: list[str] | None = None, day: int = 1, scenario: str = "throughput"
) -> dict[str, Any]:
    rows = [
        Row(
            scenario=scenario,
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


def blocks_from(results: dict[str, Any]) -> dict[str, str]:
    return blocks_of(results, sources_of(results))


def fill(folder: Path, results: dict[str, Any], *options: str) -> int:
    """Save ``results`` in ``folder`` and put them into the page that is there."""
    for file, result in results.items():
        (folder / file).write_text(json.dumps(result))
    paths = [str(folder / file) for file in results]
    return main([*paths, "--page", str(folder / "page.md"), "--folder", str(folder), *options])


def empty_page(folder: Path) -> Path:
    """A page with places that nothing has filled yet."""
    names = ("targets", "machine", "throughput", "sse", "missed")
    page = folder / "page.md"
    page.write_text("".join(f"<!-- figures: {name} -->\n<!-- end -->\n" for name in names))
    return page


def block(page: Path, name: str) -> str:
    return page.read_text().partition(f"<!-- figures: {name} -->")[2].partition("<!-- end -->")[0]


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
    blocks = blocks_from(results)
    assert "| 1 stream | trioserve bf16 | 1 | 120.0 |" in blocks["throughput"]
    assert "compare-20260101-000000.json" in blocks["throughput"]
    reached = "| 1 stream, tokens/s | llama.cpp bf16 | ≥ 1.05 times | 1.2 times | 1 | reached |"
    assert reached in blocks["targets"]
    assert "| CPU per event | uvicorn | ≤ 1.3 times | 1.2 times |  | reached |" in blocks["targets"]
    assert blocks["sse"].startswith("| events |")
    assert "2 cores of P, 23.5 GiB | Linux | 0.04 | 1 |" in blocks["machine"]
    assert "| llama.cpp bf16 | sdist x==1 |" in blocks["machine"]
    assert "missed" not in blocks["targets"]
    assert blocks["missed"].startswith("None")


def test_targets_of_a_busy_machine_decide_nothing() -> None:
    result = comparison(120.0)
    assert "quiet" not in blocks_from({"compare-1.json": result})["targets"]
    for measurement in result["measurements"]:
        measurement["values"]["elsewhere_cores"] = 0.5
    targets = blocks_from({"compare-1.json": result})["targets"]
    assert targets.startswith("**The machine wasn't quiet**")
    assert "with something else: throughput, 1 stream: 0.50." in targets


def test_of_two_results_of_one_scenario_the_later_one_counts() -> None:
    results = {
        "compare-20260102-000000.json": comparison(90.0, day=2),
        "throughput-20260101-000000.json": comparison(120.0, day=1),
    }
    blocks = blocks_from(results)
    assert "| 90.0 |" in blocks["throughput"]
    assert "120.0" not in blocks["throughput"]
    assert "1 stream, tokens/s" in blocks["missed"]


def test_results_without_figures_for_the_page_keep_no_others_off_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = empty_page(tmp_path)
    results = {
        "compare-1.json": comparison(120.0) | {"measurements": []},
        "compare-2.json": comparison(120.0, scenario="load"),
        "waiting-20260101-000000.json": comparison(1.0) | {"measurements": [{"spins": 0}]},
    }
    before = page.read_text()
    assert fill(tmp_path, results) == 1
    assert page.read_text() == before
    assert fill(tmp_path, {**results, "sse-20260101-000000.json": other(1.2)}) == 0
    assert "| events |" in block(page, "sse")
    out = capsys.readouterr().out
    for file in results:
        assert out.count(f"skipped {file}: ") == 2


def test_what_stays_on_the_page_counts_among_targets_and_machines(tmp_path: Path) -> None:
    page = empty_page(tmp_path)
    first, second = "sse-20260101-000000.json", "compare-20260103-000000.json"
    assert fill(tmp_path, {first: other(1.4)}) == 0
    assert fill(tmp_path, {second: comparison(90.0, day=3)}) == 0
    assert sources_on(page.read_text()) == {"throughput": second, "sse": first}
    for name in ("targets", "missed"):
        for what in ("CPU per event", "1 stream, tokens/s"):
            assert what in block(page, name)
    assert first in block(page, "machine")
    assert second in block(page, "machine")
    # What is given counts, though the page has later figures; those aren't on the page any more.
    third = "compare-20260101-000000.json"
    assert fill(tmp_path, {third: comparison(120.0)}) == 0
    assert "90" not in block(page, "throughput")
    assert second not in page.read_text()
    assert "1 stream, tokens/s" not in block(page, "missed")


def test_without_what_the_page_is_from_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = empty_page(tmp_path)
    assert fill(tmp_path, {"sse-20260101-000000.json": other(1.4)}) == 0
    (tmp_path / "sse-20260101-000000.json").unlink()
    before = page.read_text()
    with pytest.raises(SystemExit):
        fill(tmp_path, {"compare-1.json": comparison(90.0)})
    assert "figures from sse-20260101-000000.json: not in" in capsys.readouterr().err
    assert page.read_text() == before


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


def test_pictures_are_those_of_the_result_that_the_figures_are_from(tmp_path: Path) -> None:
    page = empty_page(tmp_path)
    results = {f"compare-2026010{day}-000000.json": comparison(day, day=day) for day in (1, 2)}
    results["sse-20260101-000000.json"] = other(1.0)
    for file in results:
        plots = (tmp_path / file).with_suffix("")
        plots.mkdir()
        (plots / "throughput-bf16-load.png").write_bytes(file.encode())
        (plots / "rates-bf16-load.png").write_bytes(b"not on the page")
    (tmp_path / "sse-20260101-000000.png").write_bytes(b"cost")
    # The earlier result comes last: it is the time that decides.
    assert fill(tmp_path, dict(reversed(results.items())), "--pictures") == 0
    line = "![throughput-bf16-load](pictures/throughput-bf16-load.png)"
    assert block(page, "throughput").count(line) == 1
    assert "![sse](pictures/sse.png)" in block(page, "sse")
    copies = {path.name: path.read_bytes() for path in (tmp_path / "pictures").iterdir()}
    assert copies == {
        "throughput-bf16-load.png": b"compare-20260102-000000.json",
        "sse.png": b"cost",
    }


def test_pictures_stay_as_long_as_their_figures(tmp_path: Path) -> None:
    page = empty_page(tmp_path)
    file = "compare-20260101-000000.json"
    plot = tmp_path / "compare-20260101-000000" / "throughput-bf16-load.png"
    plot.parent.mkdir()
    plot.write_bytes(b"load")
    assert fill(tmp_path, {file: comparison(100.0)}, "--pictures") == 0
    with_pictures = page.read_text()
    plot.unlink()
    assert fill(tmp_path, {file: comparison(100.0)}, "--pictures") == 0
    assert page.read_text() == with_pictures
    assert fill(tmp_path, {"compare-20260102-000000.json": comparison(90.0, day=2)}) == 0
    assert "pictures/" not in page.read_text()


def test_every_version_of_a_server_on_the_page_is_named() -> None:
    results = {
        "compare-20260101-000000.json": comparison(100.0),
        "memory-20260102-000000.json": comparison(100.0, day=2, scenario="start"),
    }
    results["memory-20260102-000000.json"]["servers"] = {"llama.cpp bf16": {"sdist": "x==2"}}
    for measurement in results["memory-20260102-000000.json"]["measurements"]:
        measurement["values"] = {"first_token_seconds": 1.0}
    machine = blocks_from(results)["machine"]
    assert "| llama.cpp bf16 | sdist x==1 |" in machine
    assert "| llama.cpp bf16 | sdist x==2 |" in machine


def test_the_readme_s_figures_are_those_of_the_page() -> None:
    """``python -m bench.readme_figures`` writes them."""
    readme = (PAGE.parents[1] / "README.md").read_text()
    assert filled(readme, {"summary": figures(PAGE.read_text())}) == readme
