"""``python -m bench.lease``: prepare at home, run on the GPU, collect at home.

Test and measure everything that needs a GPU, on a machine that is rented for half an hour, lets
commands run for ten minutes, and has torch but none of this project's other packages.

  at home     python -m bench.lease prepare
  there       python -m bench.lease run --part 1
              python -m bench.lease run --part 2
              python -m bench.lease run --part 3
  at home     python -m bench.lease collect part-1.tar.gz part-2.tar.gz part-3.tar.gz

Part 1 asks whether the kernels are right, and times one decode step. Part 2 times each kernel
beside FlashInfer and torch. Part 3 runs the sanitizers, the whole server and all decode steps.

Carry the prepared folder (.lease, which git ignores) together with the repository. A machine where
all packages are installed needs no such folder. The exit status of a part is 1 if a step failed,
ran out of time or was not run.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.lease.call import Call, LeaseError, scratch_folder
from bench.lease.plan import PARTS, ROOT


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, do what it says, and return the exit status."""
    began = time.monotonic()
    options = _parser().parse_args(arguments)
    try:
        return int(options.do(options, began) or 0)
    except LeaseError as error:
        print(f"bench.lease: {error}", file=sys.stderr)
        return 1


def _run(options: argparse.Namespace, began: float) -> int:
    # Processes are ended on the way out; the archive is at most a few seconds old.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    call = Call(
        part=options.part,
        on=options.on,
        out=options.out.absolute(),
        prepared=options.folder.absolute(),
        scratch=scratch_folder(),
    )
    return call.run(began)


def _prepare(options: argparse.Namespace, began: float) -> None:
    from bench.lease.prepare import prepare

    prepare(options.folder.absolute(), python=options.python, target=options.target)


def _collect(options: argparse.Namespace, began: float) -> int:
    from bench.lease.collect import collect

    return collect(options.archives)


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m bench.lease", description=__doc__, formatter_class=raw
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    folder = ROOT / ".lease"
    out = Path(os.environ.get("OUT") or ROOT / "bench" / "results" / "lease")
    prepare = commands.add_parser("prepare", help="fill the folder that is carried")
    prepare.set_defaults(do=_prepare)
    add = prepare.add_argument
    add("--python", default="3.12", help="version of the other machine's Python (default: 3.12)")
    add("--target", default="sm_90a", help="what its GPU runs (default: sm_90a, an H100 or H200)")
    add("--folder", type=Path, default=folder, help="default: .lease")
    run = commands.add_parser("run", help="run one part, the most telling steps first")
    run.set_defaults(do=_run)
    add = run.add_argument
    add("--part", type=int, choices=PARTS, required=True)
    add("--out", type=Path, default=out, help="folder for the archive (default: $OUT)")
    add("--folder", type=Path, default=folder, help="what was prepared (default: .lease)")
    add("--on", choices=["gpu", "emulation"], default="gpu", help="emulation times nothing")
    collect = commands.add_parser("collect", help="put results where they belong")
    collect.set_defaults(do=_collect)
    collect.add_argument("archives", nargs="+", type=Path, metavar="ARCHIVE")
    return parser


if __name__ == "__main__":
    sys.exit(main())
