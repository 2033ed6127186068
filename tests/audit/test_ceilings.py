"""No file, function or class outgrows its ceiling, and no class shares its name with another."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.source_files import ROOT, modules_of

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PUBLIC_METHODS = 25
MAX_BENCH_LINES = 8_000
"""Lines of Python in all benchmarks."""
SOURCES = {".py", ".cu", ".cuh", ".cpp", ".h"}
FACES = {
    "Engine": "the public API of an engine",
}
"""Classes that may have more public methods, each with its reason."""
SHARED_NAMES: dict[str, str] = {}
"""Names that two classes may share, each with its reason."""


def sources(package: str) -> list[Path]:
    """Return the sources of a package."""
    return [path for path in sorted((ROOT / package).rglob("*")) if path.suffix in SOURCES]


def long_functions(source: str) -> Iterator[str]:
    """Yield the functions with more lines than the ceiling."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield f"{node.name} has {lines} lines, at most {MAX_FUNCTION_LINES}"


def wide_classes(source: str) -> Iterator[str]:
    """Yield the names of classes with more public methods than the ceiling."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            names = {
                each.name
                for each in node.body
                if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))
            }
            public = [name for name in names if not name.startswith("_")]
            if len(public) > MAX_PUBLIC_METHODS:
                yield node.name


def public_classes(source: str) -> list[str]:
    """Return the names of a module's public classes."""
    body = ast.parse(source).body
    return [n.name for n in body if isinstance(n, ast.ClassDef) and not n.name.startswith("_")]


@pytest.mark.parametrize("package", ["trioserve", "gpu"])
def test_a_package_keeps_the_ceilings(package: str) -> None:
    too_large = []
    for path in sources(package):
        text, name = path.read_text(), path.relative_to(ROOT)
        if text.count("\n") > MAX_FILE_LINES:
            too_large.append(f"{name} has {text.count(chr(10))} lines")
        if path.suffix == ".py":
            too_large += [f"{name}: {each}" for each in long_functions(text)]
            too_large += [f"{name}: {each}" for each in wide_classes(text) if each not in FACES]
    assert too_large == []


def test_no_two_classes_share_a_name() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for package in ("trioserve", "gpu"):
        for path in modules_of(package):
            for name in public_classes(path.read_text()):
                homes[name].append(str(path.relative_to(ROOT)))
    shared = {name: paths for name, paths in homes.items() if len(paths) > 1}
    assert {name: paths for name, paths in shared.items() if name not in SHARED_NAMES} == {}
    assert set(SHARED_NAMES) <= set(shared)


def test_the_benchmarks_stay_small() -> None:
    lines = [path.read_text().count("\n") for path in modules_of("bench")]
    assert sum(lines) <= MAX_BENCH_LINES


def test_what_is_too_large_is_found() -> None:
    body = "    x = 1\n" * MAX_FUNCTION_LINES
    assert len(list(long_functions(f"def f():\n{body}"))) == 1
    assert not list(long_functions(f"def f():\n{body[:-10]}"))
    methods = "".join(f"    def m{i}(self): ...\n" for i in range(MAX_PUBLIC_METHODS + 1))
    assert len(list(wide_classes(f"class A:\n{methods}"))) == 1
    assert public_classes("class A: ...\nclass _B: ...\n") == ["A"]
