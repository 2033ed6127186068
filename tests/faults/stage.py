"""The engines and servers that faults are done to, in this program or in processes of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import trio
from prometheus_client.parser import text_string_to_metric_families

from bench.report import Made, markdown, own_versions
from bench.servers import MODEL, Running, Server, get, running
from trioserve import Engine, ServerConfig, open_engine
from trioserve.http import create_app
from trioserve.http.server.server import serve_app
from trioserve.load.figures import spread_of

_NAME = "subject"
_IDLE_GAUGES = (
    *("num_requests_running", "num_requests_waiting", "stream_bytes"),
    "kv_cache_pages.held",
)


@contextlib.asynccontextmanager
async def serve_here(engine: Engine, **options: Any) -> AsyncIterator[int]:
    """Serve ``engine`` over HTTP on a free port, for as long as the block lasts."""
    config = ServerConfig(engine=engine.config, port=0, log_level="error", **options)
    async with trio.open_nursery() as nursery:
        (url,) = await nursery.start(serve_app, create_app(engine, config), config)
        yield int(url.rpartition(":")[2])
        nursery.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def engine_over(model: str, **options: Any) -> AsyncIterator[Engine]:
    """Yield an engine with a worker process that computes ``model`` in float32 on one core."""
    defaults = {"device": "cpu", "dtype": "float32", "num_threads": 1}
    async with open_engine(model, **{**defaults, **options}) as engine:
        yield engine


def tiny_model(folder: Path) -> str:
    """Write a small random model into ``folder``: for counts, not for words."""
    import torch

    from bench.random_model import TINY, write_model

    config = attrs.evolve(TINY, max_position_embeddings=4096)
    write_model(config, folder, torch.device("cpu"))
    return str(folder)


@contextlib.contextmanager
def model_named(name: str) -> Iterator[str]:
    """Yield the model of that name; "tiny" is a small random one."""
    with tempfile.TemporaryDirectory() as folder:
        yield tiny_model(Path(folder)) if name == "tiny" else name


def children_of(pid: int) -> list[int]:
    """Return the children of process ``pid``, whichever of its threads started them."""
    children = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                children += [int(child) for child in (task / "children").read_text().split()]
    return children


def worker_of(pid: int) -> int | None:
    """Return the worker among the children of process ``pid``, None while there is none."""
    for child in children_of(pid):
        with contextlib.suppress(OSError):
            if b"--connect" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
                return child
    return None


def sole_worker() -> int | None:
    """Return the worker process of this program's engine, None while there is none."""
    return worker_of(os.getpid())


def resident_bytes(pid: int) -> int:
    """Return the memory of a process; 0 of one that has ended."""
    with contextlib.suppress(OSError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return 0


@attrs.frozen
class Subject:
    """A healthy server process and its worker."""

    running: Running

    @property
    def pid(self) -> int:
        """The server's process."""
        return self.running.process.pid

    def descriptors(self) -> int:
        """Return the number of the server's open descriptors."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def signal_worker(self, number: int = signal.SIGKILL) -> bool:
        """Send the worker a signal; return whether there was one."""
        worker = worker_of(self.pid)
        with contextlib.suppress(ProcessLookupError):
            if worker is not None:
                os.kill(worker, number)
                return True
        return False

    async def healthy(self) -> bool:
        """Return the server's own word."""
        try:
            return (await get(self.running.port, "/health"))[0] == 200
        except (OSError, trio.BrokenResourceError, IndexError):
            return False

    async def metrics(self) -> dict[str, float]:
        """Return the metrics by name, without the prefix; those with labels are summed up."""
        _, text = await get(self.running.port, "/metrics")
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name.partition(":")[2]
                state = sample.labels.get("state")
                name = f"{name}.{state}" if state else name
                values[name] = values.get(name, 0.0) + sample.value
        return values

    async def wait_idle(self, *, within: float = 60.0) -> dict[str, float]:
        """Wait until nothing is computed, waits or is held; return the metrics of that moment."""
        with trio.fail_after(within):
            while True:
                metrics = await self.metrics()
                if not any(metrics[name] for name in _IDLE_GAUGES):
                    return metrics
                await trio.sleep(0.1)


@contextlib.asynccontextmanager
async def serving(
    *options: str,
    model: str = MODEL,
    environment: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> AsyncIterator[Subject]:
    """Yield a server of ``model``; ``prefix`` is a command that starts it."""
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
    async with running(server) as up:
        yield Subject(up)


def pair(seconds: Sequence[float]) -> str:
    """Return a cell: p50 and p99 in milliseconds."""
    spread = spread_of(seconds)
    return f"{spread.p50:.1f} · {spread.p99:.1f}"


def verdict_of(title: str, figures: Mapping[str, Any], passed: bool, **facts: Any) -> Made:
    """Return a table of two columns; the exit code is 1 unless the test has ``passed``."""
    table = markdown((title, ""), list(figures.items()))
    return Made(table, {**facts, "passed": passed}, int(not passed))
