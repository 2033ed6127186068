"""All fault tests one after the other, in short form or in full.

``python -m tests.faults`` takes some minutes; ``--full`` is what ``docs/reliability.md`` shows, and
takes two hours, one of which is the soak. ``--save`` writes the table of each part.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

PARTS: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "kills": (("--kills", "5"), ()),
    "worker_kills": (("--kills", "4"), ()),
    "rank_faults": (("--faults", "12"), ()),
    "worker_removals": (("--removals", "2"), ()),
    "hangs": (("--model", "tiny", "--faults", "2", "--watchdog-timeout", "1"), ()),
    "messages": ((), ("--rounds", "3")),
    "full_disk": (("--rounds", "1"), ("--rounds", "5")),
    "clients": (("--rounds", "2"), ()),
    "disconnects": (("--samples", "20", "--real-samples", "10"), ()),
    "soak": (("--seconds", "60", "--kill-every", "20"), ()),
}
"""The modules of this package, and their options in short and in full."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; return 1 if any of them didn't pass."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--full", action="store_true", help="as in docs/reliability.md")
    parser.add_argument("--save", action="store_true", help="write tables to bench/results")
    given = parser.parse_args(arguments)
    failed = []
    for name in given.parts:
        options = [*PARTS[name][given.full], *(["--save"] if given.save else [])]
        command = [sys.executable, "-m", f"tests.faults.{name}", *options]
        print(f"\n$ python {' '.join(command[1:])}", flush=True)
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    print(f"\nfailed: {', '.join(failed)}" if failed else "\nall passed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
