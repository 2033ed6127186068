"""Put figures into ``docs/performance.md``: ``python -m bench.performance_page RESULT.json ...``.

What stands between ``<!-- figures: NAME -->`` and ``<!-- end -->`` is written by this script and by
nobody else. NAME is ``targets``, ``missed``, ``machine``, a scenario of :mod:`bench.compare`, or
the name of another script's result: that has its Markdown in ``table`` and what became of targets
in ``verdicts``. Of two results of one name, the later one is taken.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.goals import Verdict, goals_table, judge
from bench.report import markdown, table
from bench.rows import QUIET, Row, busy_elsewhere

__all__ = ["blocks_of", "filled", "main", "with_pictures"]

_PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"
_PICTURES = (
    "throughput-bf16-load.png",
    "throughput-bf16-32-streams-ttft.png",
    "throughput-bf16-32-streams-itl.png",
)
_BLOCK = re.compile(r"(<!-- figures: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(page: str, blocks: Mapping[str, str]) -> str:
    """``page`` with each block that is in ``blocks``; the others stay as they are.

    Raises:
        ValueError: the page has no place for one of them.
    """
    places = {match[2] for match in _BLOCK.finditer(page)}
    if missing := sorted(blocks.keys() - places):
        raise ValueError(f"the page has no place for {', '.join(missing)}")

    def replace(match: re.Match[str]) -> str:
        text = blocks.get(match[2])
        return match[0] if text is None else f"{match[1]}\n{text.strip()}\n\n{match[3]}"

    return _BLOCK.sub(replace, page)


def blocks_of(results: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The blocks that follow from ``results``, by the names of their files.

    Raises:
        ValueError: a result holds neither rows of a comparison nor a table.
    """
    rows: dict[str, list[Row]] = {}
    others: dict[str, Mapping[str, Any]] = {}
    sources: dict[str, str] = {}
    for file in sorted(results, key=lambda file: results[file]["time"]):
        result = results[file]
        if "table" in result:
            name = _name(file)
            others[name] = result
            sources[name] = file
        elif found := _rows(result):
            for scenario in {row.scenario for row in found}:
                rows[scenario] = [row for row in found if row.scenario == scenario]
                sources[scenario] = file
        else:
            raise ValueError(f"{file} holds neither a comparison's rows nor a table")
    every = [row for chosen in rows.values() for row in chosen]
    verdicts = judge(every)
    for other in others.values():
        verdicts += [Verdict(**verdict) for verdict in other.get("verdicts", [])]
    return {
        "targets": _warning(every) + goals_table(verdicts),
        "missed": _missed(verdicts),
        "machine": _machines(results),
        **{name: f"{table(rows[name])}\n\n{_source(sources[name])}" for name in rows},
        **{name: f"{others[name]['table']}\n\n{_source(sources[name])}" for name in others},
    }


def _rows(result: Mapping[str, Any]) -> list[Row]:
    """The rows of a comparison; none of another script's result."""
    measurements = result.get("measurements", [])
    return [Row(**measurement) for measurement in measurements if "scenario" in measurement]


def _warning(rows: Sequence[Row]) -> str:
    busy = busy_elsewhere(rows) or 0.0
    if busy <= QUIET:
        return ""
    return (
        f"**The machine wasn't quiet**: {busy:.2f} cores were busy with something else, so these "
        "figures decide nothing.\n\n"
    )


def _missed(verdicts: Sequence[Verdict]) -> str:
    missed = [verdict for verdict in verdicts if verdict.met is False]
    return goals_table(missed) if missed else "None of those that were measured."


def with_pictures(
    blocks: Mapping[str, str], results: Sequence[Path], folder: Path
) -> dict[str, str]:
    """Copy the plots of ``results`` into ``folder``, and show each in the block that it is of.

    A plot lies beside its result: as a file of the same name, or in a folder of that name if it is
    one of those of :mod:`bench.pictures` that the page shows.
    """
    shown = dict(blocks)
    for path in results:
        own = path.with_suffix(".png")
        found = {_name(path.name): [own] if own.exists() else []}
        found["throughput"] = [
            picture for name in _PICTURES if (picture := path.with_suffix("") / name).exists()
        ]
        for name, pictures in found.items():
            for picture in pictures if name in shown else []:
                copy = folder / (picture.name if picture != own else f"{name}.png")
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(picture, copy)
                shown[name] += f"\n\n![{copy.stem}]({folder.name}/{copy.name})"
    return shown


def _name(file: str) -> str:
    """The name of what was measured: that of the file without its time."""
    return re.sub(r"-\d{8}-\d{6}\.json$", "", file).replace("-", "_")


def _source(file: str) -> str:
    return f"From `bench/results/{file}`."


def _machines(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Where and when each result was measured, and how quiet the machine was."""
    lines = []
    for file in sorted(results):
        result = results[file]
        machine = result["machine"]
        busy = busy_elsewhere(_rows(result))
        lines.append(
            [
                f"`{file}`",
                result["time"],
                f"{machine['cores']} cores of {machine['processor']}, {machine['memory_gib']} GiB",
                machine["system"],
                "" if busy is None else f"{busy:.2f}",
                str(len(result.get("failures", []))),
            ]
        )
    heads = ["result", "time", "machine", "system", "cores busy elsewhere", "failures"]
    return "\n\n".join([markdown(heads, lines), *_versions(results)])


def _versions(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The servers of all comparisons, a line for each."""
    servers: dict[str, Mapping[str, str]] = {}
    for file in sorted(results):
        servers |= results[file].get("servers", {})
    lines = []
    for name, versions in servers.items():
        shown = ", ".join(f"{k} {v}" for k, v in versions.items() if k != "started_with")
        lines.append([name, shown])
    return [markdown(["server", "versions"], lines)] if lines else []


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill the page; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT.json")
    parser.add_argument("--page", type=Path, default=_PAGE)
    parser.add_argument("--pictures", action="store_true", help="with the plots, copied")
    options = parser.parse_args(arguments)
    results = {path.name: json.loads(path.read_text()) for path in options.results}
    before = options.page.read_text()
    blocks = blocks_of(results)
    if options.pictures:
        blocks = with_pictures(blocks, options.results, options.page.parent / "pictures")
    after = filled(before, blocks)
    options.page.write_text(after)
    print(f"wrote {options.page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
