"""A server under attack, watched from outside: its event loop, its memory and another client.

::

    def test_something(victim: Victim) -> None:
        with victim.withstands():
            ...  # the attack, against victim.url, with the key ``secret``

The bounds are those of docs/security.md, "Attacks".
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import psutil

from tests.support.model_server import ROOT

__all__ = ["MAX_BUSY", "MAX_GAP", "MAX_MEMORY", "Victim", "besieged"]

MAX_BUSY = 0.4
"""Seconds that the event loop may be busy without a break, beside other tests."""
MAX_MEMORY = 300 * 2**20
"""Bytes that the server and its processes may take beyond what they had before."""
MAX_GAP = 1.0
"""Seconds that another client may wait, beyond the time of the attack's own largest step."""
KEYS = ("--api-key", "secret", "--admin-api-key", "admin")
_SAMPLING = 0.02
"""Seconds between two looks at the memory."""


def _memory(process: psutil.Process) -> int:
    """Return the resident memory of ``process`` and all below it, in bytes."""
    total = 0
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += each.memory_info().rss
    return total


@attrs.define
class _MemoryPeak:
    """The most memory that a tree of processes had while the block lasted."""

    process: psutil.Process
    peak: int = 0
    _ended: threading.Event = attrs.field(factory=threading.Event)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        thread = threading.Thread(target=self._watch)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def _watch(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            while not self._ended.wait(_SAMPLING):
                self.peak = max(self.peak, _memory(self.process))


@attrs.frozen
class Victim:
    """A server with the API key ``secret`` and the admin key ``admin``, on a port of its own."""

    process: subprocess.Popen[str]
    url: str
    model: str
    busy_file: Path
    log_file: Path

    def log(self) -> str:
        """Return what the server has logged so far."""
        return self.log_file.read_text(errors="replace")

    @contextlib.contextmanager
    def withstands(
        self,
        *,
        busy: float = MAX_BUSY,
        memory: int = MAX_MEMORY,
        gap: float = MAX_GAP,
    ) -> Iterator[None]:
        """Run the block beside a witness, and check the bounds behind it.

        Args:
            busy: Seconds that the event loop may be busy.
            memory: Bytes that the server's processes may take beyond what they have now.
            gap: Seconds that the witness may wait; add the attack's own step if that is long.

        Raises:
            AssertionError: a bound doesn't hold, or the server or the witness has failed.
        """
        process = psutil.Process(self.process.pid)
        with self._witness() as waited:
            self.busy_file.unlink(missing_ok=True)
            idle = _memory(process)
            watched = _MemoryPeak(process)
            with watched.watching():
                yield
        assert self.process.poll() is None, self.log()[-4000:]
        assert waited[0] <= gap, f"the witness waited {waited[0]:.2f} s"
        taken = watched.peak - idle
        assert taken <= memory, f"the server took {taken / 2**20:.0f} MiB"
        longest = float(self.busy_file.read_text())
        assert longest <= busy, f"the event loop was busy for {longest:.2f} s"

    @contextlib.contextmanager
    def _witness(self) -> Iterator[list[float]]:
        """Run a witness; its longest wait is in the list once the block has been left."""
        command = [sys.executable, "-m", "tests.attacks.witness", self.url, self.model]
        waited: list[float] = []
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield waited
            report, _ = process.communicate(timeout=180)
            assert process.returncode == 0, "the witness's stream was cut off"
            waited.append(float(report.split()[0]))


@contextlib.contextmanager
def besieged(
    *options: str,
    model: str = "smollm2-135m",
    keys: Sequence[str] = KEYS,
    num_files: int | None = None,
) -> Iterator[Victim]:
    """Serve ``model`` in a process of its own for as long as the block lasts.

    ``options`` are further ones of ``trioserve serve``. With ``--mock-worker 5ms`` no model is
    loaded, so the server starts sooner; use a real one where the worker or the output matters.
    ``keys`` are the options that give it keys. ``num_files`` is how many files it may have open,
    half of which it takes for connections.
    """
    with tempfile.TemporaryDirectory() as folder:
        busy_file, log_file = Path(folder, "busy"), Path(folder, "log")
        command = [
            *(sys.executable, "-m", "tests.attacks.victim", "serve", model, "--port", "0"),
            *("--log-format", "json"),
            *keys,
            *options,
        ]
        if num_files is not None:
            command = ["prlimit", f"--nofile={num_files}:{num_files}", *command]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "BUSY_FILE": str(busy_file)}
        with (
            log_file.open("w") as log,
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                cwd=ROOT,
            ) as process,
        ):
            try:
                assert process.stdout is not None
                *_, url = process.stdout.readline().split() or [""]
                assert url.startswith("http"), log_file.read_text()
                yield Victim(process, url, model, busy_file, log_file)
            finally:
                process.kill()
