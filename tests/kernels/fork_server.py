"""Runs pytest in forked children of one process that has imported what all tests import.

A crash, a sanitizer's exit or a hang ends the child only. Requests and replies are lines of JSON on
stdin and stdout; ``python -m tests.kernels.fork_server`` is started by :class:`ForkServer`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.kernels.sanitizers import environment, without_address_randomization

__all__ = ["ForkServer"]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TIMED_OUT = -1000
# A sanitizer writes to the file, which pytest would have replaced and lost with the process.
_OPTIONS = [
    "-x",
    "-q",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:faulthandler",
    "--tb=short",
    "--capture=sys",
]


class ForkServer:
    """A process, with a sanitizer if one is named, that runs pytest when asked to."""

    def __init__(self, sanitizer: str) -> None:
        self.sanitizer = sanitizer
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.kernels.fork_server"],
            cwd=ROOT,
            env=environment(sanitizer),
            preexec_fn=without_address_randomization(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, arguments: list[str], *, log: Path, seconds: float = 900) -> int:
        """pytest's exit code, minus the number of a signal, or TIMED_OUT; its output is in log."""
        options = [*_OPTIONS, f"--kernels-sanitizer={self.sanitizer}", *arguments]
        request = {"arguments": options, "log": str(log), "seconds": seconds}
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        reply = self._process.stdout.readline()
        if not reply:
            raise RuntimeError(f"the process with sanitizer {self.sanitizer!r} has ended")
        return int(json.loads(reply))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def _run_in_child(arguments: list[str], log: Path, seconds: float) -> int:
    child = os.fork()
    if child == 0:
        code = 3
        try:
            with log.open("wb") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            import pytest

            code = int(pytest.main(arguments))
            sys.stdout.flush()
        finally:
            os._exit(code)
    end = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return TIMED_OUT
        time.sleep(0.01)


def _import_all() -> None:
    """Import what a test of kernels does: torch, the ``conftest`` files, pytest with its plugins.

    Every child would take many times as long for that as for its tests.
    """
    import pytest

    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
        options = [*_OPTIONS, "--collect-only", "--thorough"]
        code = pytest.main([*options, str(HERE / "test_silu_mul.py")])
    assert code == 0, "a test of kernels can't be collected"


def _serve() -> None:
    _import_all()
    for line in sys.stdin:
        request = json.loads(line)
        code = _run_in_child(request["arguments"], Path(request["log"]), request["seconds"])
        print(json.dumps(code), flush=True)


if __name__ == "__main__":
    _serve()
