"""Puts results into their folder, and their tables into the pages."""

from __future__ import annotations

import json
import re
import sys
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.lease.archive import members
from bench.lease.goals import goals_page
from bench.lease.manifest import PreparedError
from bench.performance_page import filled

_RESULT = re.compile(r"results/((kernels|decode-step|engine-idle)-\d{8}-\d{6}\.json)")
_PARTS = ("cases", "steps")
"""Lists of a result that several processes measured a piece of each."""
_TABLES = {"kernels": "gpu_kernels", "decode-step": "gpu_steps", "engine-idle": "gpu_engine"}
"""Kinds of results, and their places on the page."""


def collect(archives: Sequence[Path], *, results: Path, docs: Path) -> int:
    """Read ``archives``, write one result of each kind, fill the pages; 1 if nothing was timed."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for archive in archives:
        try:
            for kind, file, result in _results_in(archive):
                found.setdefault(kind, {})[file] = result
            print(_summary_in(archive))
        except (OSError, ValueError, tarfile.TarError) as error:
            raise PreparedError(f"{archive} can't be read: {error}") from error
    whole: dict[str, Mapping[str, Any]] = {}
    results.mkdir(parents=True, exist_ok=True)
    for kind, files in sorted(found.items()):
        newest = max(files)
        whole[kind] = merged([files[file] for file in sorted(files)])
        (results / newest).write_text(json.dumps(whole[kind], indent=2) + "\n")
        print(f"wrote {results / newest}")
    if not whole:
        print("bench.lease: the archives have no figures", file=sys.stderr)
        return 1
    _fill(docs / "kernels.md", {"gpu_goals": goals_page(list(whole.values()))})
    _fill(docs / "performance.md", tables_of(whole))
    return 0


def merged(results: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return one result of all: facts of the last one, pieces and rows of each in turn."""
    whole = dict(results[-1])
    for name in _PARTS:
        if name in whole:
            whole[name] = [piece for result in results for piece in result[name]]
    heads = results[-1]["table"].splitlines()[:2]
    rows = [row for result in results for row in result["table"].splitlines()[2:]]
    whole["table"] = "\n".join([*heads, *rows])
    return whole


def tables_of(whole: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return each kind's block of the page, with the card and the revision below."""
    blocks = {}
    for kind, result in whole.items():
        about = f"{result['device']}, {result['time'][:10]}, revision {result['commit']}."
        blocks[_TABLES[kind]] = f"{result['table']}\n\n{about}"
    return blocks


def _summary_in(archive: Path) -> str:
    return "".join(data.decode() for name, data in members(archive) if name == "summary.md")


def _results_in(archive: Path) -> Iterable[tuple[str, str, Mapping[str, Any]]]:
    for name, data in members(archive):
        match = _RESULT.fullmatch(name)
        if match:
            yield match[2], match[1], json.loads(data)


def _fill(page: Path, blocks: Mapping[str, str]) -> None:
    page.write_text(filled(page.read_text(), blocks))
    print(f"wrote {page}")
