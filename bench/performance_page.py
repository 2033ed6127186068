"""Put figures into ``docs/performance.md``: ``python -m bench.performance_page RESULT.json ...``.

What stands between ``<!-- figures: NAME -->`` and ``<!-- end -->`` is written by this script and by
nobody else. NAME is ``targets``, ``missed``, ``machine``, a scenario of :mod:`bench.compare`, or
the name of another script's result: that has its Markdown in ``table`` and what became of targets
in ``verdicts``. Of two results of one name, the later one is taken. What isn't given anew stays,
and counts among the targets and machines: the results that it says it is from are read again.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.goals import Verdict, goals_table, judge
from bench.page_pictures import pictures_in, plots_of, show_plots
from bench.report import markdown, table
from bench.rows import QUIET, Row, busy_cases, busy_elsewhere

__all__ = ["RESULTS", "blocks_of", "filled", "main", "sources_of", "sources_on"]

RESULTS = Path(__file__).parent / "results"
_PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"
_BLOCK = re.compile(r"(<!-- figures: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_SOURCE = re.compile(r"^From `bench/results/(\S+)`\.$", re.MULTILINE)


def filled(page: str, blocks: Mapping[str, str]) -> str:
    """``page`` with each block that is in ``blocks``; the others stay as they are.

    Raises:
        ValueError: the page has no place for one of them.
    """
    if missing := sorted(blocks.keys() - _blocks_on(page).keys()):
        raise ValueError(f"the page has no place for {', '.join(missing)}")

    def replace(match: re.Match[str]) -> str:
        text = blocks.get(match[2])
        return match[0] if text is None else f"{match[1]}\n{text.strip()}\n\n{match[4]}"

    return _BLOCK.sub(replace, page)


def sources_on(page: str) -> dict[str, str]:
    """The file of results that each filled block of ``page`` says it is from."""
    found = {name: _SOURCE.search(text) for name, text in _blocks_on(page).items()}
    return {name: match[1] for name, match in found.items() if match}


def sources_of(results: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The file of ``results`` that each block follows from: the latest that has figures for it."""
    sources: dict[str, str] = {}
    for file in sorted(results, key=lambda file: results[file]["time"]):
        if "table" in results[file]:
            sources[_name(file)] = file
        else:
            sources |= {row.scenario: file for row in _rows(results[file])}
    return sources


def blocks_of(
    results: Mapping[str, Mapping[str, Any]], sources: Mapping[str, str]
) -> dict[str, str]:
    """The blocks in ``sources``, each from its file in ``results``, and those about all of them."""
    every: list[Row] = []
    others: list[Verdict] = []
    blocks: dict[str, str] = {}
    for name, file in sources.items():
        result = results[file]
        if "table" in result:
            others += [Verdict(**verdict) for verdict in result.get("verdicts", [])]
            shown = result["table"]
        else:
            rows = [row for row in _rows(result) if row.scenario == name]
            every += rows
            shown = table(rows)
        blocks[name] = f"{shown}\n\nFrom `bench/results/{file}`."
    verdicts = judge(every) + others
    return {
        "targets": _warning(every) + goals_table(verdicts),
        "missed": _missed(verdicts),
        "machine": _machines({file: results[file] for file in sources.values()}),
        **blocks,
    }


def _blocks_on(page: str) -> dict[str, str]:
    return {match[2]: match[3] for match in _BLOCK.finditer(page)}


def _rows(result: Mapping[str, Any]) -> list[Row]:
    """The rows of a comparison; none of another script's result."""
    measurements = result.get("measurements", [])
    return [Row(**measurement) for measurement in measurements if "scenario" in measurement]


def _warning(rows: Sequence[Row]) -> str:
    busy = {name: cores for name, cores in busy_cases(rows).items() if cores > QUIET}
    if not busy:
        return ""
    named = "; ".join(f"{name}: {cores:.2f}" for name, cores in busy.items())
    return (
        "**The machine wasn't quiet**, and figures of these cases decide nothing. So many cores "
        f"were busy with something else: {named}.\n\n"
    )


def _missed(verdicts: Sequence[Verdict]) -> str:
    missed = [verdict for verdict in verdicts if verdict.met is False]
    return goals_table(missed) if missed else "None of those that were measured."


def _name(file: str) -> str:
    """The name of what was measured: that of the file without its time."""
    return re.sub(r"-\d{8}-\d{6}\.json$", "", file).replace("-", "_")


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
    """The servers of all comparisons, a line for each version of each."""
    lines = []
    for file in sorted(results):
        for name, versions in results[file].get("servers", {}).items():
            shown = ", ".join(f"{k} {v}" for k, v in versions.items() if k != "started_with")
            lines.append((name, shown))
    return [markdown(["server", "versions"], list(dict.fromkeys(lines)))] if lines else []


def _read(paths: Iterable[Path]) -> dict[str, Mapping[str, Any]]:
    return {path.name: json.loads(path.read_text()) for path in paths}


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill the page; the exit code, 1 if no result has figures for it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("results", nargs="+", type=Path, metavar="RESULT.json")
    add("--page", type=Path, default=_PAGE)
    add("--folder", type=Path, default=RESULTS, help="with the results that the page is from")
    add("--pictures", action="store_true", help="with the plots, copied")
    options = parser.parse_args(arguments)
    page = options.page.read_text()
    before, places = sources_on(page), _blocks_on(page)
    paths = {path.name: path for path in options.results}
    results = _read(paths.values())
    new = {name: file for name, file in sources_of(results).items() if name in places}
    for file in sorted(results.keys() - set(new.values())):
        print(f"skipped {file}: the page shows none of its figures, or a later result has them")
    if not new:
        print("nothing to put into the page", file=sys.stderr)
        return 1
    chosen = before | new
    kept = {file: options.folder / file for file in chosen.values() if file not in paths}
    if lost := sorted(file for file, path in kept.items() if not path.exists()):
        parser.error(f"the page has figures from {', '.join(lost)}: not in {options.folder}")
    paths |= kept
    results |= _read(kept.values())
    # In the order of the page, whichever of them are new.
    sources = {name: chosen[name] for name in places if name in chosen}
    blocks = blocks_of(results, sources)
    for name, file in sources.items():
        plots = plots_of(name, paths[file]) if options.pictures else {}
        # Plots may be kept nowhere but on the page: they stay as long as their figures do.
        stay = pictures_in(places[name]) if before.get(name) == file else []
        pictures = show_plots(plots, options.page.parent / "pictures") if plots else stay
        blocks[name] = "\n\n".join([blocks[name], *pictures])
    options.page.write_text(filled(page, blocks))
    print(f"wrote {options.page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
