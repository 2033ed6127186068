"""The server as a process, with a real worker: signals end it properly, and a kill leaves nothing.

Where it doesn't matter what the model says there is none.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import attrs
import httpx
import psutil
import pytest
import trio

import trioserve
from tests.support.http_stub import connect, http_client, raw_request, read_to_end, read_until
from tests.support.tiny_models import make_tiny
from trioserve import EngineConfig, ServerConfig

ROOT = Path(__file__).parents[2]
PATH = "/v1/completions"
WITHOUT_A_MODEL = """
import sys
from trioserve.front_ends import serving
from trioserve.cli.commands import main
from trioserve.http import server
from trioserve.testing.fake_engine import open_fake_engine
from trioserve.testing import FakeWorker

def worker():
    return FakeWorker(
        max_num_seqs=200, max_model_len=10_000, max_num_batched_tokens=1024, num_pages=4000,
        step_time=0.5,
    )

# Hundreds of last events take longer than usual where the machine is slow or busy.
server.FINAL_GRACE = 30.0
serving.open_engine = lambda *_, **__: open_fake_engine(worker)
sys.exit(main())
"""
LAST_CHUNK = b"\r\n0\r\n\r\n"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama2")
    return make_tiny("llama2", folder, max_position_embeddings=8192)


def request(**fields: Any) -> bytes:
    body = {"prompt": [3, 4, 5], "ignore_eos": True, "max_tokens": 8000, "stream": True, **fields}
    return raw_request(json.dumps(body).encode(), path=PATH)


@attrs.define(eq=False)
class Server:
    """A server's process."""

    process: subprocess.Popen[bytes]
    temporary: Path
    url: str = ""
    _seen: dict[int, psutil.Process] = attrs.field(factory=dict)

    def children(self) -> list[psutil.Process]:
        """Return what it has started that lives."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self._seen.setdefault(child.pid, child)
        return [child for child in self._seen.values() if _lives(child)]

    def wait_until_it_serves(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        assert line.startswith("Serving "), "the server ended"
        self.url = line.split(" at ")[1].strip()

    async def worker(self) -> psutil.Process:
        """Return the worker, as soon as there is one."""
        while True:
            for child in self.children():
                # A process that was only just made has its parent's command line for a moment.
                with contextlib.suppress(psutil.NoSuchProcess):
                    if {"-m", "gpu"} <= {*child.cmdline()}:
                        return child
            await trio.sleep(0.002)

    async def stream(self, **fields: Any) -> trio.SocketStream:
        """Return a connection over which a stream has begun."""
        client = await connect(self.url)
        await client.send_all(request(**fields))
        await read_until(client, b"data: {")
        return client

    async def ended(self, within: float = 60) -> tuple[int, str]:
        """Return its exit code and its stderr; assert that no process is left."""
        self.children()
        assert self.process.stderr is not None
        with trio.fail_after(within):
            error = await trio.to_thread.run_sync(self.process.stderr.read)
            code = await trio.to_thread.run_sync(self.process.wait)
        assert self.children() == []
        assert list(self.temporary.glob("trioserve-*")) == []
        return code, error.decode()


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def start(tmp_path: Path) -> Any:
    """Starts servers, which are killed at the end."""
    servers: list[Server] = []

    def start(model: Path | None, *options: str) -> Server:
        if model is None:
            command = ["-c", WITHOUT_A_MODEL, "serve", "fake"]
        else:
            command = ["-m", "trioserve", "serve", str(model), "--device", "cpu"]
            command += ["--num-threads", "1"]
        place = () if "--uds" in options else ("--port", "0")
        temporary = tmp_path / "tmp"
        temporary.mkdir(exist_ok=True)
        process = subprocess.Popen(
            [sys.executable, *command, *place, "--log-level", "error", *options],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": str(temporary)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        servers.append(Server(process, temporary))
        return servers[-1]

    yield start
    for server in servers:
        server.children()
        server.process.kill()
        # A child that is stopped keeps the pipes open.
        for child in server.children():
            child.kill()
        server.process.communicate()


def last_event(answer: bytes) -> dict[str, Any]:
    """Return the data of the last event of a stream, which has to have a proper end."""
    assert answer.endswith(b"\n\n" + LAST_CHUNK), answer[-300:]
    event = answer.removesuffix(LAST_CHUNK).split(b"data: ")[-1]
    return {} if event.startswith(b"[DONE]") else json.loads(event)


class TestManyStreams:
    """200 that run, others that wait, and some that aren't streamed."""

    RUNNING, WAITING, WHOLE = 200, 20, 10

    @contextlib.asynccontextmanager
    async def clients(self, server: Server) -> AsyncIterator[list[bytes]]:
        """Open all of them, at work; their answers when the block has ended."""
        answers: list[bytes] = []

        async def read(client: trio.SocketStream) -> None:
            answers.append(await read_to_end(client))

        async with trio.open_nursery() as nursery:
            for index in range(self.RUNNING + self.WAITING + self.WHOLE):
                client = await connect(server.url)
                streamed = index < self.RUNNING + self.WAITING
                await client.send_all(request(stream=streamed))
                if streamed:
                    await read_until(client, b"200")
                nursery.start_soon(read, client)
            async with http_client(server.url) as client:
                while await _num_waiting(client) < self.WAITING + self.WHOLE:
                    await trio.sleep(0.05)
            yield answers

    def check(self, answers: list[bytes]) -> None:
        assert len(answers) == self.RUNNING + self.WAITING + self.WHOLE
        for answer in answers:
            if answer.startswith(b"HTTP/1.1 503 "):
                assert b"retry-after: 1\r\n" in answer.lower()
                error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
            else:
                error = last_event(answer)["error"]
            assert error["code"] == "shutting_down"
        assert sum(answer.startswith(b"HTTP/1.1 503 ") for answer in answers) == self.WHOLE

    async def test_sigterm_and_no_time_to_finish(self, start: Any) -> None:
        server = start(None, "--shutdown-timeout", "1")
        server.wait_until_it_serves()
        async with self.clients(server) as answers:
            server.process.send_signal(signal.SIGTERM)
            # They would take more than an hour.
            code, error = await server.ended()
        assert code == 3
        assert error == ""
        self.check(answers)

    async def test_a_second_signal(self, start: Any) -> None:
        server = start(None, "--shutdown-timeout", "600")
        server.wait_until_it_serves()
        async with self.clients(server) as answers:
            server.process.send_signal(signal.SIGTERM)
            async with http_client(server.url) as client:
                while (await client.get("/health")).status_code != 503:
                    await trio.sleep(0.01)
            server.process.send_signal(signal.SIGINT)
            code, error = await server.ended()
        assert code == 128 + signal.SIGINT
        assert error == ""
        self.check(answers)


async def _num_waiting(client: httpx.AsyncClient) -> float:
    lines = (await client.get("/metrics")).text.splitlines()
    (line,) = [line for line in lines if line.startswith("trioserve:num_requests_waiting{")]
    return float(line.rsplit(" ", 1)[1])


async def test_a_signal_to_every_process_at_once_and_a_worker_that_is_replaced(
    tiny: Path, start: Any
) -> None:
    """Service managers send this signal; running requests are finished all the same."""
    server = start(tiny, "--shutdown-timeout", "120")
    server.wait_until_it_serves()
    client = await server.stream(max_tokens=400)
    worker = await server.worker()
    worker.kill()
    for process in (server.process, *server.children()):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGTERM)
    answer = await read_to_end(client)
    assert answer.endswith(b"data: [DONE]\n\n" + LAST_CHUNK)
    assert b'"finish_reason":"length"' in answer
    code, error = await server.ended()
    assert (code, error) == (0, "")


async def test_a_signal_while_the_model_is_loaded(tiny: Path, start: Any) -> None:
    server = start(tiny)
    await server.worker()
    server.process.send_signal(signal.SIGTERM)
    code, error = await server.ended()
    assert (code, error) == (128 + signal.SIGTERM, "")


async def test_an_engine_that_fails_ends_the_server_and_every_stream(
    tiny: Path, start: Any
) -> None:
    server = start(tiny, "--max-worker-restarts", "0")
    server.wait_until_it_serves()
    client = await server.stream()
    (await server.worker()).kill()
    event = last_event(await read_to_end(client))
    code, error = await server.ended()
    assert event["error"]["code"] == "engine_error"
    assert code == 1
    line = error.splitlines()[-1]
    assert line.startswith("trioserve: the engine failed: process ")
    assert "was killed by signal 9" in line
    assert "Traceback" not in error


async def test_a_killed_server_leaves_nothing_that_the_next_start_does_not_take_away(
    tiny: Path, start: Any, tmp_path: Path
) -> None:
    path = tmp_path / "server.sock"
    options = ("--uds", str(path))
    # When the worker's process is there, it hasn't connected yet: Python itself takes longer.
    early = start(tiny, *options)
    await early.worker()
    early.process.kill()
    left = early.temporary.glob("trioserve-*")
    assert len(list(left)) == 1
    late = start(tiny, *options)
    late.wait_until_it_serves()
    assert list(late.temporary.glob("trioserve-*")) == []
    worker = await late.worker()
    transport = httpx.AsyncHTTPTransport(uds=str(path))
    async with http_client("http://x", transport=transport) as client:
        body = {"prompt": [3], "max_tokens": 2, "structured_outputs": {"regex": "[ab]+"}}
        assert (await client.post(PATH, json=body)).status_code == 200
    assert len(late.children()) == 2  # the worker's own child tries grammars out
    late.process.kill()
    for server in (early, late):
        with trio.fail_after(60):
            while server.children():
                await trio.sleep(0.01)
    assert not _lives(worker)
    assert path.exists()
    last = start(tiny, *options)
    last.wait_until_it_serves()
    transport = httpx.AsyncHTTPTransport(uds=str(path))
    async with http_client("http://x", transport=transport) as client:
        assert (await client.get("/health")).status_code == 200
    last.process.send_signal(signal.SIGTERM)
    assert await last.ended() == (0, "")
    assert not path.exists()


async def test_a_nursery_that_is_cancelled_ends_its_server_with_50_streams(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    # As long as a slow machine takes for fifty last events.
    monkeypatch.setattr("trioserve.http.server.server.CANCELLED_GRACE", 30.0)
    engine = EngineConfig(str(tiny), device="cpu", num_threads=1, max_num_seqs=40)
    config = ServerConfig(engine=engine, port=0)
    answers: list[bytes] = []
    tasks = trio.lowlevel.current_statistics().tasks_living

    async def read(client: trio.SocketStream) -> None:
        answers.append(await read_to_end(client))

    async with trio.open_nursery() as readers:
        async with trio.open_nursery() as nursery:
            (url,) = await nursery.start(trioserve.serve, config)
            for _ in range(50):
                client = await connect(url)
                await client.send_all(request())
                await read_until(client, b"200")
                readers.start_soon(read, client)
            children = psutil.Process().children()
            workers = [child for child in children if "gpu" in child.cmdline()]
            nursery.cancel_scope.cancel()
        assert len(workers) == 1
        assert not _lives(workers[0])
    assert len(answers) == 50
    for answer in answers:
        assert last_event(answer)["error"]["code"] == "shutting_down"
    assert list(tmp_path.glob("trioserve-*")) == []
    assert trio.lowlevel.current_statistics().tasks_living == tasks


@pytest.mark.parametrize("loaded", [True, False])
async def test_ctrl_c_in_a_program_that_handles_no_signal(
    loaded: bool, tiny: Path, tmp_path: Path
) -> None:
    program = (
        "import sys, trio, trioserve\n"
        "async def main():\n"
        "    engine = trioserve.EngineConfig(sys.argv[1], device='cpu', num_threads=1)\n"
        "    config = trioserve.ServerConfig(engine=engine, port=0)\n"
        "    async with trio.open_nursery() as nursery:\n"
        "        urls = await nursery.start(trioserve.serve, config)\n"
        "        print('Serving it at', urls[0], flush=True)\n"
        "try:\n"
        "    trio.run(main)\n"
        "except* KeyboardInterrupt:\n"
        "    sys.exit(7)\n"
    )
    process = subprocess.Popen(  # noqa: ASYNC220 (as the tests without trio do)
        [sys.executable, "-c", program, str(tiny)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        # Where the tests run in a shell's background they start with the signal ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    server = Server(process, tmp_path)
    try:
        if loaded:
            server.wait_until_it_serves()
            client = await server.stream()
        else:
            await server.worker()
        server.children()
        process.send_signal(signal.SIGINT)
        if loaded:
            assert last_event(await read_to_end(client))["error"]["code"] == "shutting_down"
        code, error = await server.ended()
        assert (code, error) == (7, "")
    finally:
        process.kill()
        process.communicate()
