"""The real server with a real model, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx

__all__ = ["MODEL", "Server"]

ROOT = Path(__file__).parent.parent
MODEL = "smollm2-135m"


class Server:
    """``python -m trioserve serve`` with an API key, on a port of its own choosing."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "trioserve", "serve", MODEL, "--port", "0"),
                *("--api-key", "secret", "--log-format", "json", "--keep-alive-interval", "0.5"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert self.process.stdout is not None
        announcement = self.process.stdout.readline()
        assert announcement.startswith(f"Serving {MODEL} at http://127.0.0.1:"), announcement
        self.url = announcement.split()[-1]

    def metrics(self) -> dict[str, float]:
        headers = {"Authorization": "Bearer secret"}
        text = httpx.get(f"{self.url}/metrics", headers=headers, timeout=60).text
        samples = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        return {name.split("{")[0]: float(value) for name, value in samples}

    def wait_until_idle(self) -> None:
        deadline = time.monotonic() + 15
        while self.metrics()["trioserve:num_requests_running"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
