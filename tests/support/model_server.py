"""The real server with a real model, in a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import attrs

__all__ = ["MODEL", "ROOT", "Server", "serving", "serving_folder"]

ROOT = Path(__file__).parents[2]
MODEL = "smollm2-135m"


@attrs.frozen
class Server:
    """A server that wants the API key ``secret``."""

    process: subprocess.Popen[str]
    url: str
    _log: IO[bytes]

    def log(self) -> str:
        """Return its log so far."""
        # Not by seek and read, which would move where the server writes.
        return os.pread(self._log.fileno(), 1 << 24, 0).decode()

    def metrics(self) -> dict[str, float]:
        headers = {"Authorization": "Bearer secret"}
        request = urllib.request.Request(f"{self.url}/metrics", headers=headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read().decode()
        samples = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        return {name.split("{")[0]: float(value) for name, value in samples}

    def wait_until_idle(self) -> None:
        deadline = time.monotonic() + 60
        while self.metrics()["trioserve:num_requests_running"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@contextlib.contextmanager
def serving(*options: str, model: str = MODEL) -> Iterator[Server]:
    """``python -m trioserve serve`` on a port of its own choosing, for as long as the block lasts.

    ``model`` is a known name or a folder. ``options`` are further ones.

    Prompts are not cached: in bfloat16 one that is found in the cache may be rounded otherwise than
    one that isn't, and tests compare what was streamed with what was not.
    """
    command = [
        *(sys.executable, "-m", "trioserve", "serve", model, "--port", "0", "--api-key", "secret"),
        *("--log-format", "json", "--keep-alive-interval", "0.5", "--no-enable-prefix-caching"),
        *options,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (
        # A file, since a pipe without a reader would fill up and stop the server.
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        ) as process,
    ):
        try:
            assert process.stdout is not None
            *words, url = process.stdout.readline().split() or [""]
            server = Server(process, url, log)
            assert words == ["Serving", Path(model).name, "at"], server.log()
            yield server
        finally:
            process.kill()


@contextlib.contextmanager
def serving_folder(folder: Path, *options: str) -> Iterator[str]:
    """Serve the model in ``folder`` as ``the-model`` in a process, and yield the URL."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "trioserve", "serve", str(folder), "--port", "0"),
            *("--served-model-name", "the-model", "--log-format", "json", *options),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert process.stdout is not None
        announcement = process.stdout.readline()
        assert announcement.startswith("Serving the-model at"), process.communicate()
        yield announcement.split()[-1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.communicate()
