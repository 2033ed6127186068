"""The server as a process: its signals, and a log that isn't read."""

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

import httpx
import pynng
import pytest
import trio

ROOT = Path(__file__).parents[2]


@contextlib.asynccontextmanager
async def serving(*options: str, stderr: Any = subprocess.PIPE) -> AsyncIterator[Any]:
    """Run a server's process and yield it with a client; its engine has no model."""
    command = [
        sys.executable,
        "-m",
        "tests.support.fake_server",
        "serve",
        "fake",
        "--port",
        "0",
        *options,
    ]
    process = await trio.lowlevel.open_process(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr
    )
    try:
        assert process.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            part = await process.stdout.receive_some()
            assert part, "the server ended"
            line += part
        url = line.decode().split(" at ")[1].strip()
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            yield process, client
    finally:
        process.kill()


async def complete(client: httpx.AsyncClient, *prompts: str) -> httpx.Response:
    body = {"prompt": prompts, "max_tokens": 3, "ignore_eos": True}
    return await client.post("/v1/completions", json=body)


async def read_events(process: trio.Process) -> AsyncIterator[dict[str, Any]]:
    assert process.stderr is not None
    data = b""
    async for part in process.stderr:
        *lines, data = (data + part).split(b"\n")
        for line in lines:
            yield json.loads(line)


async def test_a_dump_at_sigusr1_even_while_the_event_loop_is_held_up() -> None:
    dumps: list[str] = []
    options = ("--log-format", "json", "--log-level", "error")
    async with serving(*options) as (process, client), trio.open_nursery() as nursery:

        async def watch() -> None:
            async for event in read_events(process):
                if event["event"] == "holding the loop up":
                    process.send_signal(signal.SIGUSR1)
                if event["event"] == "task dump":
                    dumps.append(event["tasks"])

        nursery.start_soon(watch)
        assert (await complete(client, "hold!")).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    (dump,) = dumps
    assert " in Event.wait\n" in dump
    assert dump.startswith("engine fake\nrequests open: 1; ")
    assert " in token\n" in dump
    assert " in Scheduler._receive\n" in dump


async def test_a_log_that_nobody_takes_ends_nothing() -> None:
    """Survive a full disk, a reader that has left, and one that has stopped reading."""
    reading, closed = os.pipe()
    os.close(reading)
    stuck_reading, stuck = os.pipe()
    full = os.open("/dev/full", os.O_WRONLY)
    sinks = (closed, stuck, full)

    async def use(sink: int) -> None:
        async with serving("--log-requests", stderr=sink) as (process, client):
            for _ in range(10):  # Each line is 8 kB, and a pipe takes 64.
                assert (await complete(client, *["x" * 1000] * 8)).status_code == 200
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0

    async with trio.open_nursery() as nursery:
        for sink in sinks:
            nursery.start_soon(use, sink)
    for descriptor in (*sinks, stuck_reading):
        os.close(descriptor)


async def test_a_worker_shows_its_threads_at_a_signal_and_at_a_crash(tmp_path: Path) -> None:
    url = f"ipc://{tmp_path}/worker.sock"
    command = [sys.executable, "-P", "-m", "gpu", "--connect", url]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with pynng.Pair0(listen=url, recv_timeout=150_000) as socket:
        process = await trio.lowlevel.open_process(
            command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
        )
        try:
            await trio.to_thread.run_sync(socket.recv)  # Hello
            process.send_signal(signal.SIGUSR1)
            assert process.stderr is not None
            text = b""
            while b"in _run_module_as_main\n" not in text:
                text += await process.stderr.receive_some()
            assert b"in main\n" in text
            assert b"in watch\n" in text
            # A crash while the threads are still being shown would show nothing.
            await trio.sleep(0.5)
            process.send_signal(signal.SIGSEGV)
            while part := await process.stderr.receive_some():
                text += part
            assert await process.wait() == -signal.SIGSEGV
        finally:
            process.kill()
    assert b"Segmentation fault" in text
    assert text.count(b"in main\n") == 2


@pytest.mark.parametrize("stderr", ["there", "closed"])
def test_a_command_that_ends_by_a_fault_shows_its_stack(stderr: str) -> None:
    program = "import os\nfrom trioserve.cli import commands\n"
    program += "commands.main = os.abort\ncommands.run()"
    close = "" if stderr == "there" else "2>&-"
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {close}', sys.executable, program],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    assert done.returncode == -signal.SIGABRT
    if stderr == "there":
        assert b"Fatal Python error: Aborted" in done.stderr
        assert b"in run\n" in done.stderr
