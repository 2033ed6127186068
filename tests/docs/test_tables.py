"""Tables that a program makes are on the pages as it makes them now."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.support.doc_blocks import ROOT, blocks


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "_ext"))
    return importlib.import_module("tables")


def test_the_committed_tables_are_the_ones_that_are_made(tables: Any) -> None:
    """``python docs/_ext/tables.py`` writes them."""
    stale = [page.name for page in tables.pages() if tables.filled(page) != page.read_text()]
    assert not stale, "run `python docs/_ext/tables.py`"


def test_every_table_is_on_a_page(tables: Any) -> None:
    text = "".join(page.read_text() for page in tables.pages())
    for name in tables.TABLES:
        assert f"<!-- table: {name} -->\n\n|" in text or f"<!-- table: {name} -->\n\n#" in text


def test_a_page_is_written_anew(
    tables: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "one.py").write_text("print(1)\n")
    page = tmp_path / "docs" / "page.md"
    page.write_text(
        "a\n<!-- table: options -->\nold\n<!-- end -->\n<!-- file: ../one.py -->\n<!-- end -->\n"
    )
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    assert tables.main() == 0
    assert page.read_text().startswith("a\n<!-- table: options -->\n\n## ")
    assert page.read_text().endswith("```py\nprint(1)\n```\n\n<!-- end -->\n")
    assert tables.filled(page) == page.read_text()


def test_no_block_is_made_when_the_docs_are_built() -> None:
    """But a reference of the API, which a web view can't have."""
    made = {block.language for block in blocks() if block.language.startswith("{")}
    assert made <= {"{eval-rst}", "{toctree}"}
