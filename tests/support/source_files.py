"""The project's own source files, as text."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def modules_of(package: str) -> list[Path]:
    """Return a package's files, without those of hidden folders: ``bench/.peers`` has others'."""
    paths = sorted((ROOT / package).rglob("*.py"))
    return [path for path in paths if "/." not in str(path.relative_to(ROOT))]


def imports_of(path: Path) -> Iterator[str]:
    """Yield the full name of every module that a file's import statements name."""
    return names_imported(path.read_text())


def names_imported(source: str) -> Iterator[str]:
    """Yield the full names in a source's import statements, wherever they stand."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"a relative import in line {node.lineno}"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
