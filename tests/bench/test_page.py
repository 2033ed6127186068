"""Figures on a page: they come from results, and from nowhere else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from bench.performance_page import PAGES, ROOT, filled, page_blocks, readme_figures
from bench.report import Verdict

PAGE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
MACHINE = {"cores": 2, "processor": "P", "memory_gib": 23.5, "system": "Linux"}
EMPTY = "".join(
    f"<!-- figures: {name} -->\n<!-- end -->\n"
    for name in ("targets", "machine", "start", "sse", "missed")
)


def blocks_from(folder: Path, **results: Any) -> dict[str, str]:
    for name, result in results.items():
        (folder / "cpu.isa").mkdir(exist_ok=True)
        (folder / "cpu.isa" / f"{name}.json").write_text(json.dumps(result))
    return page_blocks(EMPTY, folder)


def result(reached: float, table: str, **facts: Any) -> dict[str, Any]:
    bounds = {"what": "seconds", "against": "peer", "bound": 1.3, "at_most": True}
    verdicts = [attrs.asdict(Verdict(reached=reached, **bounds))]
    facts = {"time": "2026-01-02", "machine": MACHINE, "verdicts": verdicts, **facts}
    return {**facts, "table": table}


def test_a_block_is_replaced_and_the_rest_of_the_page_is_kept() -> None:
    page = (
        "a\n<!-- figures: one -->\nold\n<!-- end -->\nb\n<!-- figures: two -->\nc\n<!-- end -->\n"
    )
    once = filled(page, {"one": "new"})
    assert once == page.replace("\nold\n", "\n\nnew\n\n")
    assert filled(once, {"one": "new"}) == once
    with pytest.raises(ValueError, match="no place for three"):
        filled(page, {"three": "new"})


def test_tables_targets_and_machines_come_from_the_results(tmp_path: Path) -> None:
    blocks = blocks_from(tmp_path, sse=result(1.0, "| events |"), start=result(2.0, "| starts |"))
    assert blocks["sse"] == "| events |\n\nFrom `bench/results/cpu.isa/sse.json`."
    assert "| 1 times |  | reached |" in blocks["targets"]
    assert "| 2 times |  | **missed** |" in blocks["missed"]
    assert "| 1 times |" not in blocks["missed"]
    assert "| `start.json` | 2026-01-02 | 2 cores of P, 23.5 GiB |" in blocks["machine"]
    assert filled(EMPTY, blocks).count("| starts |") == 1


def test_machines_arent_mixed(tmp_path: Path) -> None:
    (tmp_path / "other.isa").mkdir()
    other = result(2.0, "| slow |")
    (tmp_path / "other.isa" / "sse.json").write_text(json.dumps(other))
    blocks = blocks_from(tmp_path, sse=result(1.0, "| quick |"))
    quick, slow = blocks["sse"].split("**other.isa**")
    assert "**cpu.isa**" in quick
    assert "| quick |" in quick
    assert "| slow |" in slow
    assert "None of those" in blocks["missed"].split("**other.isa**")[0]
    assert "**missed**" in blocks["missed"].split("**other.isa**")[1]


def test_targets_of_a_busy_machine_decide_nothing(tmp_path: Path) -> None:
    quiet = result(1.0, "", busy={"start": 0.02})
    assert "wasn't quiet" not in blocks_from(tmp_path, start=quiet)["targets"]
    disturbed = result(1.0, "", busy={"start, one": 0.02, "start, two": 0.7})
    blocks = blocks_from(tmp_path, start=disturbed)
    assert "**The machine wasn't quiet**" in blocks["targets"]
    assert "something else: start, two: 0.70." in blocks["targets"]
    assert "| 0.70 | 0 |" in blocks["machine"]


def test_every_version_of_a_server_on_the_page_is_named(tmp_path: Path) -> None:
    def with_server(version: str) -> dict[str, Any]:
        known = {"sdist": version, "started_with": "--threads 2"}
        return result(1.0, "", servers={"llama.cpp bf16": known})

    machine = blocks_from(tmp_path, sse=with_server("x==1"), start=with_server("x==2"))["machine"]
    assert "| llama.cpp bf16 | sdist x==1 |" in machine
    assert "| llama.cpp bf16 | sdist x==2 |" in machine
    assert "--threads" not in machine


def test_the_pages_have_the_figures_of_the_results() -> None:
    """``python -m bench.performance_page`` writes them."""
    for name in PAGES:
        page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
        assert filled(page, page_blocks(page)) == page
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert filled(readme, {"summary": readme_figures()}) == readme
