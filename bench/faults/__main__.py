"""All fault tests one after the other, in short form or in full, and one page of their tables.

``python -m bench.faults`` takes some minutes; ``--full`` is what ``docs/reliability.md`` shows, and
takes two hours, one of which is the soak. Each part writes its record, and the page is saved beside
them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime

import attrs

from bench.faults.results import RESULTS
from bench.report import machine, own_versions


@attrs.frozen
class Part:
    """A module of this package, and its command line in short and in full."""

    name: str
    short: Sequence[str]
    full: Sequence[str] = ()


PARTS = (
    Part("kills", ("--kills", "5")),
    Part("hangs", ("--model", "tiny", "--stops", "3", "--watchdog-timeout", "1")),
    Part("messages", (), ("--rounds", "3")),
    Part("full_disk", ("--rounds", "1"), ("--rounds", "5")),
    Part("clients", ("--rounds", "2")),
    Part("disconnects", ("--samples", "20", "--real-samples", "10")),
    Part("soak", ("--seconds", "60", "--kill-every", "20")),
)


def _run(part: Part, arguments: Sequence[str]) -> tuple[int, str]:
    """Run one part; its exit status, and what it wrote."""
    command = [sys.executable, "-m", f"bench.faults.{part.name}", *arguments]
    print(f"$ python {' '.join(command[1:])}", flush=True)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    return process.wait(), "".join(lines)


def _tables(output: str) -> str:
    return "".join(line for line in output.splitlines(keepends=True) if line.startswith("|"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts and save the page. 1 if any of them didn't pass."""
    parser = argparse.ArgumentParser(prog="python -m bench.faults", description=__doc__)
    names = [part.name for part in PARTS]
    parser.add_argument("--parts", type=lambda text: text.split(","), default=names)
    parser.add_argument("--full", action="store_true", help="as in docs/reliability.md")
    given = parser.parse_args(arguments)
    if unknown := set(given.parts) - set(names):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    here, versions = machine(), own_versions()
    page = [
        f"# Faults, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        f"{here['cores']} cores of {here['processor']}, {here['system']}; "
        + ", ".join(f"{name} {value}" for name, value in versions.items()),
    ]
    failed = []
    for part in PARTS:
        if part.name in given.parts:
            status, output = _run(part, part.full if given.full else part.short)
            page += [f"## {part.name}", _tables(output) or "no table: it failed"]
            if status:
                failed.append(part.name)
    page.append(f"Failed: {', '.join(failed)}" if failed else "All passed.")
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"faults-{datetime.now(UTC):%Y%m%d-%H%M%S}.md"
    path.write_text("\n\n".join(page) + "\n")
    print(f"saved {path}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
