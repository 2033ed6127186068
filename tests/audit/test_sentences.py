"""The project's sentences keep the rules of ``sentences.py``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.audit.sentences import (
    Finding,
    findings_in_c,
    findings_in_markdown,
    findings_in_python,
)
from tests.support.source_files import ROOT

EXCEPTIONS: dict[str, str] = {
    "gpu/mock.py": "the mock worker's text is a story about a man",
    "trioserve/load/texts.py": "lists common English words",
}
"""Files that are left out, each with its reason."""
PLACES = ("trioserve", "gpu", "bench", "tests", "docs", "README.md", "noxfile.py")
ENDINGS = {".py", ".md", ".cu", ".cuh", ".cpp", ".h"}


def files_of(place: str) -> list[Path]:
    """Return the sources and pages of a folder that the rules hold for, or a file itself."""
    path = ROOT / place
    return sorted(filter(is_ours, path.rglob("*"))) if path.is_dir() else [path]


def is_ours(path: Path) -> bool:
    """Return whether ``path`` is a source or a page of the project, and not made by a tool."""
    folders = set(path.relative_to(ROOT).parts[:-1])
    is_hidden = any(name[0] == "." for name in folders)
    return path.suffix in ENDINGS and not is_hidden and not folders & {"node_modules", "_build"}


def findings_in(path: Path) -> Iterator[Finding]:
    """Yield what breaks a rule in the file."""
    text = path.read_text()
    if path.suffix == ".py":
        return findings_in_python(text, messages=path.parts[len(ROOT.parts)] != "tests")
    return findings_in_markdown(text) if path.suffix == ".md" else findings_in_c(text)


@pytest.mark.parametrize("place", PLACES)
def test_a_folder_keeps_the_rules(place: str) -> None:
    found = {str(path.relative_to(ROOT)): list(findings_in(path)) for path in files_of(place)}
    broken = [f"{name}:{each}" for name in found.keys() - EXCEPTIONS for each in found[name]]
    assert sorted(broken) == []
    kept = [name for name in found.keys() & EXCEPTIONS if not found[name]]
    assert kept == [], "these are exceptions no longer"


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ('"""What a module is."""', "beginning of a module's docstring"),
        ('class A:\n    """Whose key it is."""', "beginning of a class's docstring"),
        ('def f():\n    """Whether it is."""', "beginning of a function's docstring"),
        ('x = 1\n"""Of all prompts."""', "beginning of a field's docstring"),
        ('def f():\n    """The page."""', "a function's docstring begins with a verb"),
        ("x = 1  # nobody waits", "a word for people, 'nobody'"),
        ('"""A request.\n\nWhoever asks, waits.\n"""', "a word for people, 'Whoever'"),
        ('raise ValueError("somebody holds the page")', "a word for people, 'somebody'"),
    ],
)
def test_a_planted_sentence_is_found(source: str, rule: str) -> None:
    assert [each.rule for each in findings_in_python(source)] == [rule]


@pytest.mark.parametrize(
    "source",
    [
        'class A:\n    @property\n    def page(self):\n        """The page."""',
        'def f():\n    """Return the page whose level is lowest."""',
        'x = "who"',
    ],
)
def test_a_plain_sentence_is_not(source: str) -> None:
    assert list(findings_in_python(source)) == []


def test_pages_and_kernels_are_read_too() -> None:
    page = "Whoever waits.\n```text\nnobody\n```\nAnd somebody.\n"
    assert [each.line for each in findings_in_markdown(page)] == [1, 5]
    assert [each.line for each in findings_in_c("int who;\nint a;  // who reads it\n")] == [2]
