"""Install the peers, each into an environment of its own: ``python -m bench.peers [NAME ...]``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bench.peers import MAKERS


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MAKERS)}")
    names = parser.parse_args(arguments).names or list(MAKERS)
    if unknown := [name for name in names if name not in MAKERS]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(MAKERS)}")
    for name in names:
        MAKERS[name]()
        print(f"{name} is ready", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
