"""The drawings of the packages are those of today's imports, and stay readable."""

from __future__ import annotations

import importlib

import pytest

from tests.support.source_files import ROOT

MAX_BOXES = 25


@pytest.mark.parametrize("package", ["trioserve", "gpu"])
def test_the_drawing_is_of_todays_imports(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs" / "_ext")
    packages = importlib.import_module("packages")
    graph = packages.graph_of(package)
    assert len(graph) <= MAX_BOXES
    drawn = (ROOT / "docs" / "pictures" / packages.PICTURES[package]).read_text()
    assert drawn == packages.drawing(graph, package), "run `python docs/_ext/packages.py`"
