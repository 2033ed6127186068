"""The server as a process: what it does at signals, and when nobody takes its log."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import trio

ROOT = Path(__file__).parent.parent


@contextlib.asynccontextmanager
async def serving(*options: str, stderr: Any = subprocess.PIPE) -> AsyncIterator[Any]:
    """A server's process and a client of it; its engine has no model."""
    command = [sys.executable, "-m", "tests.fake_server", "serve", "fake", "--port", "0", *options]
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
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            yield process, client
    finally:
        process.kill()


async def complete(client: httpx.AsyncClient, prompt: str = "x") -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 3, "ignore_eos": True}
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
    assert dump.startswith("engine fake\nrequests open: 1; ")
    assert " in token\n" in dump
    assert " in Scheduler._receive\n" in dump
