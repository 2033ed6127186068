"""A signal while a model is downloaded: the program doesn't wait for the rest."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
COMMIT = "a" * 40


class Hub(http.server.BaseHTTPRequestHandler):
    """A Hub with one model; it begins to send the file and never ends."""

    begun: threading.Event
    ended: threading.Event

    def do_HEAD(self) -> None:
        headers = {"Content-Length": "1000", "ETag": '"x"', "X-Repo-Commit": COMMIT}
        self._head(200 if "/resolve/" in self.path else 404, headers)

    def do_GET(self) -> None:
        if self.path.startswith("/api/models/"):
            file = {"type": "file", "path": "config.json", "size": 1000, "oid": "b" * 40}
            model = {"id": "org/name", "sha": COMMIT, "siblings": [{"rfilename": "config.json"}]}
            body = json.dumps([file] if "/tree/" in self.path else model).encode()
            self._head(200, {"Content-Type": "application/json", "Content-Length": str(len(body))})
            self.wfile.write(body)
            return
        self.do_HEAD()
        if "/resolve/" in self.path:
            self.begun.set()
            while not self.ended.wait(0.1):
                with contextlib.suppress(OSError):
                    self.wfile.write(b" ")

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[Hub]:
    class OfThisTest(Hub):
        begun, ended = threading.Event(), threading.Event()

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), OfThisTest)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    OfThisTest.server = server  # type: ignore[assignment]
    yield OfThisTest  # type: ignore[misc]
    OfThisTest.ended.set()
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_download_ends_with_the_first_signal(hub: Any, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server.server_port}",
        "HF_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "127.0.0.1",
    }
    command = [sys.executable, "-m", "trioserve", "serve", "org/name", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE) as server:
        try:
            assert hub.begun.wait(120)
            server.send_signal(signal.SIGTERM)
            assert server.wait(120) == 128 + signal.SIGTERM
            assert server.stderr is not None
            assert b"Traceback" not in server.stderr.read()
        finally:
            server.kill()
