"""``python -m bench.lease``: prepare at home, run on the GPU, collect at home."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.lease.call import Call, run_part, scratch_folder
from bench.lease.manifest import FOLDER, PreparedError
from bench.lease.plan import LIMIT, PARTS, RESERVE, ROOT

_DESCRIPTION = f"""\
Test and measure everything that needs a GPU, on a machine that is rented for half an hour, lets
commands run for ten minutes, and has torch but none of this project's other packages.

  at home     python -m bench.lease prepare
  there       python -m bench.lease run --part 1
              python -m bench.lease run --part 2
              python -m bench.lease run --part 3
  at home     python -m bench.lease collect part-1.tar.gz part-2.tar.gz part-3.tar.gz

Part 1 asks whether the kernels are right, and times one decode step. Part 2 times each kernel
beside FlashInfer and torch. Part 3 runs the sanitizers, the whole server and all decode steps.

Carry the prepared folder ({FOLDER.name}, which git ignores) together with the repository. A
machine where all packages are installed needs no such folder.
"""
_RUN = f"""\
Run one part in at most {LIMIT:.0f} seconds, the most telling steps first. Steps that fail or run
out of time stop none behind them. The archive is written anew after each step and every few
seconds, so a call that is killed leaves what it had. The exit status is 1 if a step failed, ran
out of time or was not run.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, do what it says, and return the exit status."""
    began = time.monotonic()
    options = _parser().parse_args(arguments)
    try:
        if options.command == "run":
            return _run(options, began)
        if options.command == "prepare":
            return _prepare(options)
        from bench.lease.collect import collect

        return collect(options.archives, results=options.results, docs=options.docs)
    except PreparedError as error:
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
        seconds=options.seconds,
        scratch=scratch_folder(),
    )
    return run_part(call, began)


def _prepare(options: argparse.Namespace) -> int:
    from bench.lease.prepare import prepare
    from gpu.kernels.nvrtc import KernelBuildError

    try:
        prepare(options.folder.absolute(), python=options.python, target=options.target)
    except KernelBuildError as error:
        raise PreparedError(str(error)) from error
    return 0


def _seconds(text: str) -> float:
    value = float(text)
    if not RESERVE < value <= LIMIT:
        raise argparse.ArgumentTypeError(f"{text} is not within {RESERVE:.0f} and {LIMIT:.0f}")
    return value


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m bench.lease", description=_DESCRIPTION, formatter_class=raw
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add = commands.add_parser("prepare", help="fill the folder that is carried").add_argument
    add("--python", default="3.12", help="version of the other machine's Python (default: 3.12)")
    add("--target", default="sm_90a", help="what its GPU runs (default: sm_90a, an H100 or H200)")
    add("--folder", type=Path, default=FOLDER, help=f"default: {FOLDER.name}")
    run = commands.add_parser("run", help="run one part", description=_RUN, formatter_class=raw)
    add = run.add_argument
    add("--part", type=int, choices=PARTS, required=True)
    add("--out", type=Path, default=_default_out(), help="folder for the archive (default: $OUT)")
    add("--seconds", type=_seconds, default=LIMIT, help=f"bound (default: {LIMIT:.0f})")
    add("--folder", type=Path, default=FOLDER, help=f"what was prepared (default: {FOLDER.name})")
    add("--on", choices=["gpu", "emulation"], default="gpu", help="emulation times nothing")
    add = commands.add_parser("collect", help="put results where they belong").add_argument
    add("archives", nargs="+", type=Path, metavar="ARCHIVE")
    add("--results", type=Path, default=ROOT / "bench" / "results")
    add("--docs", type=Path, default=ROOT / "docs")
    return parser


def _default_out() -> Path:
    return Path(os.environ.get("OUT") or ROOT / "bench" / "results" / "lease")


if __name__ == "__main__":
    sys.exit(main())
