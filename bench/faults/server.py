"""A server process of this very tree, which the faults are done to."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import attrs
import trio
from prometheus_client.parser import text_string_to_metric_families

from bench.faults.processes import Footprint, footprint, workers_of
from bench.report import own_versions
from bench.servers import MODEL, Running, Server, running
from trioserve.load import Target

_NAME = "subject"
_IDLE_GAUGES = ("num_requests_running", "num_requests_waiting", "stream_bytes")


@attrs.frozen(kw_only=True)
class Subject:
    """A healthy server process and its worker."""

    running: Running
    log: Path

    @property
    def pid(self) -> int:
        """The server's process."""
        return self.running.process.pid

    @property
    def target(self) -> Target:
        """Where its completions are."""
        return self.running.target

    def worker(self) -> int | None:
        """The worker's process, None while there is none."""
        return next(iter(workers_of(self.pid)), None)

    def signal_worker(self, number: int = signal.SIGKILL) -> bool:
        """Send the worker a signal; says whether there was one."""
        worker = self.worker()
        if worker is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, number)
            return True
        return False

    def footprints(self) -> tuple[Footprint, Footprint | None]:
        """What the server and its worker hold."""
        worker = self.worker()
        of_worker = None
        if worker is not None:
            with contextlib.suppress(OSError):
                of_worker = footprint(worker)
        return footprint(self.pid), of_worker

    async def get(self, path: str) -> tuple[int, str]:
        """Status and body of a GET."""
        head = f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode()
        async with await trio.open_tcp_stream("127.0.0.1", self.running.port) as stream:
            await stream.send_all(head)
            answer = b"".join([part async for part in stream])
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split()[1]), body.decode()

    async def healthy(self) -> bool:
        """Whether it says so of itself."""
        try:
            return (await self.get("/health"))[0] == 200
        except (OSError, trio.BrokenResourceError, IndexError):
            return False

    async def metrics(self) -> dict[str, float]:
        """Its metrics by name, without the prefix; those with labels of their own are summed up."""
        _, text = await self.get("/metrics")
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name.partition(":")[2]
                state = sample.labels.get("state")
                name = f"{name}.{state}" if state else name
                values[name] = values.get(name, 0.0) + sample.value
        return values

    async def wait_idle(self, *, within: float = 60.0) -> dict[str, float]:
        """Wait until nothing is computed, waits or is held; the metrics of that moment.

        Raises:
            trio.TooSlowError: something is still held.
        """
        with trio.fail_after(within):
            while True:
                metrics = await self.metrics()
                if not any(metrics[name] for name in (*_IDLE_GAUGES, "kv_cache_pages.held")):
                    return metrics
                await trio.sleep(0.1)


@contextlib.asynccontextmanager
async def serving(
    *options: str,
    model: str = MODEL,
    environment: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> AsyncIterator[Subject]:
    """A server of ``model`` with command line ``options``, for as long as the block lasts.

    Args:
        options: what follows ``trioserve serve MODEL``.
        model: what it serves.
        environment: variables of its own.
        prefix: a command that starts it.

    Raises:
        ServerFailed: it doesn't start.
    """
    server = Server(
        name="trioserve",
        argv=lambda port: [
            *(*prefix, sys.executable, "-m", "trioserve", "serve", model),
            *("--port", str(port), "--served-model-name", _NAME),
            *("--log-format", "json", "--log-level", "warning"),
            # Outputs are compared with what the parameters of the requests alone give.
            *("--generation-config", "vllm", *options),
        ],
        fields={"model": _NAME, "stream_options": {"include_usage": True}},
        versions=own_versions(),
        env=environment or {},
    )
    with tempfile.TemporaryDirectory(prefix="trioserve-faults-") as folder:
        log = Path(folder) / "log"
        async with running(server, log) as up:
            yield Subject(running=up, log=log)
