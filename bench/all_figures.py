"""All that ``docs/performance.md`` shows: ``python -m bench.all_figures --minutes 60``.

Comparisons of servers have most of the time, and the measurements of single parts go first, because
they take what they take. Then the figures are put into the page. The machine should do nothing
else. Exit code 1: one of them failed; what the others measured is on the page all the same.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.compare import RESULTS
from bench.peers import SERVERS

__all__ = ["main", "new_results"]

_SAVED = ("--save", str(RESULTS))
_PARTS: dict[str, tuple[str, ...]] = {
    "bench.sse": (),
    "bench.micro": (),
    "bench.front_end": (),
    "bench.accuracy": (),
    "bench.waiting": _SAVED,
    "bench.tokenizing": _SAVED,
    "bench.embeddings": _SAVED,
    "bench.experts": _SAVED,
    "bench.memory_parts": _SAVED,
    "bench.long_prompts": (*_SAVED, "--plans", "1", "--lengths", "1000", "4000", "--rounds", "2"),
}
"""Scripts, and how they are called."""
# However little time is left, a comparison takes each server once.
_LEAST_MINUTES = 5.0


def new_results(folder: Path, before: set[Path]) -> list[Path]:
    """The results in ``folder`` that weren't there before."""
    return sorted(set(folder.glob("*.json")) - before)


def _run(*command: str) -> int:
    print("\n" + " ".join(command), flush=True)
    return subprocess.run([sys.executable, "-m", *command], check=False).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure everything and fill the page; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="for all of it, about")
    parser.add_argument("--without", nargs="*", default=[], choices=_PARTS, help="leave out")
    parser.add_argument("--peers", nargs="+", default=list(SERVERS), choices=list(SERVERS))
    options = parser.parse_args(arguments)
    began = time.monotonic()
    before = set(RESULTS.glob("*.json"))
    failed = [
        part for part, how in _PARTS.items() if part not in options.without and _run(part, *how)
    ]
    left = options.minutes - (time.monotonic() - began) / 60
    minutes = f"{max(left, _LEAST_MINUTES):.1f}"
    peers = [word for name in options.peers for word in ("--compare", name)]
    if _run("bench.compare", *peers, "--minutes", minutes, "--plots"):
        failed.append("bench.compare")
    found = new_results(RESULTS, before)
    # A comparison that was cut short has no figures: the page passes over it.
    if found and _run("bench.performance_page", "--pictures", *map(str, found)):
        failed.append("bench.performance_page")
    if found and _run("bench.readme_figures"):
        failed.append("bench.readme_figures")
    for name in failed:
        print(f"FAILED: {name}", file=sys.stderr)
    return 1 if failed or not found else 0


if __name__ == "__main__":
    sys.exit(main())
