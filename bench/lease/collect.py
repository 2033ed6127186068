"""Puts results into their folder, and their tables into docs/performance.md."""

from __future__ import annotations

import json
import re
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.lease.call import LeaseError
from bench.lease.plan import ROOT
from bench.performance_page import fill
from bench.report import RESULTS, table_of

_RESULT = re.compile(r"results/((kernels|decode-step|engine-idle)-\d{8}-\d{6}\.json)")
_TABLES = {"kernels": "gpu_kernels", "decode-step": "gpu_steps", "engine-idle": "gpu_engine"}
"""Kinds of results, and their places on the page."""

Result = Mapping[str, Any]


def collect(
    archives: Sequence[Path],
    *,
    results: Path = RESULTS,
    page: Path = ROOT / "docs" / "performance.md",
) -> int:
    """Read ``archives``, write one result of each kind, fill the page; 1 if nothing was timed."""
    found: dict[str, dict[str, Result]] = {}
    for archive in archives:
        try:
            for name, data in members(archive):
                if match := _RESULT.fullmatch(name):
                    found.setdefault(match[2], {})[match[1]] = json.loads(data)
                if name == "summary.md":
                    print(data.decode())
        except (OSError, ValueError, tarfile.TarError) as error:
            raise LeaseError(f"{archive} can't be read: {error}") from error
    whole: dict[str, Result] = {}
    results.mkdir(parents=True, exist_ok=True)
    for kind, files in sorted(found.items()):
        path = results / max(files)
        whole[kind] = merged([files[file] for file in sorted(files)])
        path.write_text(json.dumps(whole[kind], indent=2) + "\n")
        print(f"wrote {path}")
    if not whole:
        print("bench.lease: the archives have no figures", file=sys.stderr)
        return 1
    fill(page, tables_of(whole))
    return 0


def members(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yield name and bytes of each plain file in ``archive``."""
    with tarfile.open(archive, "r:gz") as tar:
        for entry in tar:
            if file := tar.extractfile(entry):
                yield entry.name, file.read()


def merged(results: Sequence[Result]) -> Result:
    """Return one result of all: facts of the last one, and the rows of each in turn."""
    rows = [row for result in results for row in result["rows"]]
    return {**results[-1], "rows": rows, "table": table_of(rows)}


def tables_of(whole: Mapping[str, Result]) -> dict[str, str]:
    """Return each kind's block of the page, with the card and the revision below."""
    return {
        _TABLES[kind]: f"{result['table']}\n\n{result['device']}, {result['time'][:10]}, "
        f"revision {result['commit']}."
        for kind, result in whole.items()
    }
