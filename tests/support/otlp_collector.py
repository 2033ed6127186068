"""An OpenTelemetry collector for tests: takes spans by OTLP over HTTP, or fails to."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Iterator
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

__all__ = ["Collector", "collecting"]


class Collector:
    """An OTLP collector on a free port. ``status`` is its answer; it may ``hang`` until the end."""

    def __init__(self, *, status: int = 200, hang: bool = False) -> None:
        self.requests: list[tuple[str, str | None, ExportTraceServiceRequest]] = []
        self.released = threading.Event()
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                message = ExportTraceServiceRequest.FromString(body)
                collector.requests.append((self.path, self.headers["X-Key"], message))
                if hang:
                    collector.released.wait(100)
                self.send_response(status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextlib.contextmanager
def collecting(**options: Any) -> Iterator[Collector]:
    collector = Collector(**options)
    try:
        yield collector
    finally:
        collector.close()
