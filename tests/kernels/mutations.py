"""Plant one defect at a time in the kernels and see whether the tests notice.

``python -m tests.kernels.mutations`` prints a line for each defect of
:mod:`tests.kernels.planted_defects`, and ends with 1 if one survives or a replacement no longer
applies. A defect is caught if its tests fail in one of the modes: random orders with guard pages
and NaN poison, AddressSanitizer with UndefinedBehaviorSanitizer, ThreadSanitizer. The tests have to
pass in those modes without it.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import attrs

from gpu.kernels import FOLDER
from tests.kernels.fork_server import TIMED_OUT, ForkServer
from tests.kernels.planted_defects import DEFECTS, Defect

__all__ = ["Inapplicable", "Outcome", "apply", "judge", "main", "run_all"]

MODES = {"": "orders", "address": "address", "thread": "thread"}
HERE = Path(__file__).parent
NO_FAILURE, TESTS_FAILED = 0, 1
SECONDS = 900  # far more than any of the tests takes


class Inapplicable(Exception):
    """The defect can't be planted, or the tests can't be run."""


def apply(defect: Defect, folder: Path) -> None:
    """Copy the kernels' sources to ``folder`` and plant ``defect``.

    Raises:
        Inapplicable: what it replaces doesn't stand there exactly once.
    """
    for pattern in ("*.cu", "*.cuh"):
        for source in FOLDER.glob(pattern):
            shutil.copy(source, folder)
    text = (folder / defect.file).read_text()
    if (times := text.count(defect.before)) != 1:
        raise Inapplicable(f"stands {times} times in {defect.file}: {defect.before!r}")
    (folder / defect.file).write_text(text.replace(defect.before, defect.after))


def judge(code: int, log: str) -> str:
    """Return what a run of tests with exit ``code`` and output ``log`` noticed, "" for nothing.

    Raises:
        Inapplicable: the sources don't compile, no test was run, or the tests came to no end,
            which may be a slow machine's doing.
    """
    if "BuildError" in log or "BuildWarning" in log:
        reason = re.search(r"(error|warning): .*", log)
        raise Inapplicable(f"doesn't compile: {reason[0] if reason else log[-300:]}")
    if code == NO_FAILURE:
        return ""
    if code == TIMED_OUT:
        raise Inapplicable(f"the tests ran for more than {SECONDS} s")
    if "ThreadSanitizer: data race" in log:
        return "data race"
    if "ERROR: AddressSanitizer" in log:
        return "bad address"
    if "runtime error: " in log:
        return "undefined behavior"
    if code < 0:
        return f"signal {-code}"
    if code == TESTS_FAILED:
        return "rule broken" if "EmulationError" in log else "wrong result"
    raise Inapplicable(f"the tests ended with {code}: {log[-300:]}")


@attrs.define
class Outcome:
    """The outcome of the tests with one defect, or without any."""

    what: str
    where: str
    noticed: dict[str, str] = attrs.field(factory=dict)
    """By mode: how, or "" if it wasn't."""
    problem: str = ""
    seconds: float = 0.0

    @property
    def caught(self) -> bool:
        """True if any mode noticed."""
        return any(self.noticed.values())


class Runner:
    """Runs tests in each mode, on as many processes as there are threads that ask."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._servers: list[ForkServer] = []

    def run(self, tests: str, sanitizer: str, folder: Path) -> str:
        """See :func:`judge`."""
        servers: dict[str, ForkServer] = self._local.__dict__.setdefault("servers", {})
        if sanitizer not in servers:
            servers[sanitizer] = ForkServer(sanitizer)
            self._servers.append(servers[sanitizer])
        file, *options = shlex.split(tests)
        arguments = [str(HERE / file), *options, f"--kernels-folder={folder}"]
        log = folder / f"log-{sanitizer}.txt"
        code = servers[sanitizer].run(arguments, log=log, seconds=SECONDS)
        return judge(code, log.read_text(errors="replace"))

    def close(self) -> None:
        """End every process."""
        for server in self._servers:
            server.close()


@contextmanager
def _runner() -> Iterator[Runner]:
    runner = Runner()
    try:
        yield runner
    finally:
        runner.close()


def _num_processes() -> int:
    """Return one for each core, of which few are enough: each has a copy of torch in each mode."""
    return min(len(os.sched_getaffinity(0)), 8)


def _try_defect(runner: Runner, defect: Defect, every_mode: bool) -> Outcome:
    outcome = Outcome(defect.what, defect.file)
    start = time.monotonic()
    modes = sorted(MODES, key=lambda sanitizer: sanitizer != defect.sanitizer)
    with tempfile.TemporaryDirectory() as folder:
        try:
            apply(defect, Path(folder))
            for sanitizer in modes:
                outcome.noticed[sanitizer] = runner.run(defect.tests, sanitizer, Path(folder))
                if outcome.caught and not every_mode:
                    break
        except Inapplicable as problem:
            outcome.problem = str(problem)
    outcome.seconds = time.monotonic() - start
    return outcome


def _try_without(runner: Runner, tests: str, sanitizer: str) -> Outcome:
    """Return the tests without a defect, which must pass."""
    outcome = Outcome("(no defect)", tests)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for pattern in ("*.cu", "*.cuh"):
            for source in FOLDER.glob(pattern):
                shutil.copy(source, folder)
        try:
            outcome.noticed[sanitizer] = runner.run(tests, sanitizer, Path(folder))
        except Inapplicable as problem:
            outcome.problem = str(problem)
    outcome.seconds = time.monotonic() - start
    return outcome


def run_all(
    defects: Sequence[Defect],
    *,
    every_mode: bool = False,
    report: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Return the outcomes of ``defects``, in their order; ``report`` gets each when it is there."""
    outcomes = []
    with _runner() as runner, ThreadPoolExecutor(_num_processes()) as pool:
        for outcome in pool.map(lambda defect: _try_defect(runner, defect, every_mode), defects):
            outcomes.append(outcome)
            report(outcome)
    return outcomes


def run_without(defects: Sequence[Defect], outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the outcomes of the tests without a defect, in the modes in which they caught one."""
    used = {
        (defect.tests, sanitizer): None
        for defect, outcome in zip(defects, outcomes, strict=True)
        for sanitizer, how in outcome.noticed.items()
        if how
    }
    with _runner() as runner, ThreadPoolExecutor(_num_processes()) as pool:
        return list(pool.map(lambda pair: _try_without(runner, *pair), used))


def _line(outcome: Outcome) -> str:
    cells = " ".join(
        f"{outcome.noticed.get(sanitizer, '') or '-' if sanitizer in outcome.noticed else '':19s}"
        for sanitizer in MODES
    )
    return (
        f"{outcome.where:21s} {outcome.what:70s} {cells} {outcome.seconds:4.1f} s {outcome.problem}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 0 if every defect applies and is caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.mutations", description=__doc__)
    parser.add_argument("--every-mode", action="store_true", help="try each defect in all modes")
    parser.add_argument("--only", default="", help="defects whose file or text contains this")
    options = parser.parse_args(arguments)
    defects = [d for d in DEFECTS if options.only in d.file or options.only in d.what]
    start = time.monotonic()
    print(f"{'file':21s} {'defect':70s} " + " ".join(f"{name:19s}" for name in MODES.values()))
    outcomes = run_all(
        defects,
        every_mode=options.every_mode,
        report=lambda outcome: print(_line(outcome), flush=True),
    )
    clean = run_without(defects, outcomes)
    survivors = [outcome for outcome in outcomes if not outcome.caught and not outcome.problem]
    broken = [outcome for outcome in outcomes + clean if outcome.problem]
    failing = [outcome for outcome in clean if outcome.caught]
    for outcome in [*failing, *(outcome for outcome in clean if outcome.problem)]:
        print(f"{outcome.where} fails without a defect: {outcome.noticed} {outcome.problem}")
    print(
        f"{len(defects)} defects: {len(survivors)} survive, {len(broken)} don't apply, "
        f"{len(failing)} tests fail anyway; {time.monotonic() - start:.0f} s"
    )
    return 1 if survivors or broken or failing else 0


if __name__ == "__main__":
    sys.exit(main())
