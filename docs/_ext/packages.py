"""Draw the packages and their imports: ``python docs/_ext/packages.py`` writes the pictures anew.

A box is a folder of the code, as ``tests/audit/layers.py`` lists them; its row is the length of the
longest way down from it. An arrow is an import, left out where others lead to the same box.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from html import escape
from itertools import pairwise
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.audit.layers import MAY_IMPORT, all_imports, layer_of  # noqa: E402

PICTURES = {"trioserve": "packages.svg", "gpu": "packages-gpu.svg"}
BOX, GAP, ROW = (172, 30), 16, 70
"""Width and height of a box, space between boxes, and height of a row, in pixels."""

Graph = Mapping[str, frozenset[str]]


def graph_of(package: str) -> Graph:
    """Return the layers of ``package`` and, for each, those that it imports directly."""
    found: dict[str, set[str]] = {f"{package}.{name}": set() for name in MAY_IMPORT[package]}
    for each in all_imports():
        importer, imported = layer_of(each.importer), layer_of(each.imported)
        if importer in found and imported is not None and imported != importer:
            found[importer].add(imported)
            found.setdefault(imported, set())
    return {name: frozenset(others) for name, others in found.items()}


def drawing(graph: Graph, package: str) -> str:
    """Return the picture of ``graph`` as SVG.

    Raises:
        RecursionError: the imports run in a circle.
    """
    height = heights(graph)
    rows: list[list[str]] = [[] for _ in range(max(height.values()) + 1)]
    for name in graph:
        rows[height[name]].append(name)
    ways: list[list[str]] = []
    for name, other in needed(graph):
        # A long arrow has a place of its own in each row that it crosses.
        bends = [
            f"{name}>{other}>{number}" for number in range(height[name] - 1, height[other], -1)
        ]
        for number, bend in zip(range(height[name] - 1, height[other], -1), bends, strict=True):
            rows[number].append(bend)
        ways.append([name, *bends, other])
    places = placed(rows, ways)
    lines = [_way([places[each] for each in way]) for way in ways]
    lines += [_box(name.removeprefix(f"{package}."), *places[name]) for name in graph]
    width = max(x for x, _ in places.values()) + BOX[0] / 2 + GAP
    return _document(lines, width, len(rows) * ROW)


def heights(graph: Graph) -> dict[str, int]:
    """Return the length of the longest way down from each box."""

    @cache
    def height(name: str) -> int:
        return max((height(other) + 1 for other in graph[name]), default=0)

    return {name: height(name) for name in graph}


def needed(graph: Graph) -> list[tuple[str, str]]:
    """Return the arrows without those that other arrows imply."""

    @cache
    def below(name: str) -> frozenset[str]:
        return graph[name].union(*(below(other) for other in graph[name]))

    return [
        (name, other)
        for name in graph
        for other in sorted(graph[name])
        if not any(other in below(between) for between in graph[name] - {other})
    ]


def placed(rows: list[list[str]], ways: list[list[str]]) -> dict[str, tuple[float, float]]:
    """Return the top middle of each box and bend, close to what is below it."""
    under: dict[str, list[str]] = {}
    for way in ways:
        for upper, lower in pairwise(way):
            under.setdefault(upper, []).append(lower)
    places: dict[str, tuple[float, float]] = {}
    widest = max(sum(_room(each) for each in row) for row in rows)
    for number, row in enumerate(rows):
        wanted = {
            each: fmean([places[other][0] for other in under.get(each, ())] or [widest / 2])
            for each in row
        }
        left = (widest - sum(_room(each) for each in row)) / 2
        for each in sorted(row, key=lambda each: wanted[each]):
            top = (len(rows) - 1 - number) * ROW + GAP
            places[each] = (left + _room(each) / 2 + GAP, top)
            left += _room(each)
    return places


def _room(name: str) -> int:
    return GAP if ">" in name else BOX[0] + GAP


def _way(points: list[tuple[float, float]]) -> str:
    """Return a curve down through ``points``, from the first box to the last."""
    x, y = points[0][0], points[0][1] + BOX[1]
    path = f"M{x:.0f} {y:.0f}"
    for next_x, next_y in points[1:]:
        end = next_y - 5 if (next_x, next_y) == points[-1] else next_y + BOX[1] / 2
        bend = (end - y) / 2
        path += f" C{x:.0f} {y + bend:.0f} {next_x:.0f} {end - bend:.0f} {next_x:.0f} {end:.0f}"
        x, y = next_x, end
    return f'<path d="{path}"/>'


def _box(name: str, x: float, y: float) -> str:
    left = x - BOX[0] / 2
    return (
        f'<rect x="{left:.0f}" y="{y:.0f}" width="{BOX[0]}" height="{BOX[1]}" rx="4"/>'
        f'<text x="{x:.0f}" y="{y + 19:.0f}">{escape(name)}</text>'
    )


def _document(lines: list[str], width: float, height: float) -> str:
    style = (
        "rect{fill:#f5f7fa;stroke:#4a6785}path{fill:none;stroke:#8a9bb0;marker-end:url(#tip)}"
        "text{font:12px sans-serif;fill:#1c2733;text-anchor:middle}"
    )
    tip = (
        '<marker id="tip" viewBox="0 0 6 6" refX="3" refY="3" markerWidth="6" markerHeight="6" '
        'orient="auto"><path d="M0 0 L6 3 L0 6 Z" style="fill:#8a9bb0;stroke:none"/></marker>'
    )
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    begin = f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>'
    background = '<rect width="100%" height="100%" style="fill:#fff;stroke:none"/>'
    return "\n".join([begin, f"<defs>{tip}</defs>", background, *lines, "</svg>", ""])


def main() -> None:
    """Write the pictures into docs/pictures."""
    for package, file in PICTURES.items():
        graph = graph_of(package)
        (ROOT / "docs" / "pictures" / file).write_text(drawing(graph, package))
        print(f"{file}: {len(graph)} boxes", file=sys.stderr)


if __name__ == "__main__":
    main()
