"""Engines with workers that join over TLS, and agents in the same process."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

from trioserve import Engine, open_engine
from trioserve.model_files import open_model
from trioserve.protocol.wire import MockSteps
from trioserve.workers.remote.agent import Agent
from trioserve.workers.remote.tls import worker_tls

STEP = 0.01
TOKENS = 60
"""Tokens of an output."""
LONG = 400
"""Tokens of an output that a client leaves."""
ENGINE_OPTIONS: dict[str, Any] = {
    "data_parallel_size": 0,
    "device": "cpu",
    "num_threads": 1,
    "worker_listen": "127.0.0.1:0",
    "worker_link_timeout": 1.0,
}


def address_of(engine: Engine) -> str:
    """Return the address of an engine's port for workers."""
    port = engine.worker_group.port
    assert port is not None
    return port.bound


def agent_for(address: str, tls: Path, model: Path, **more: Any) -> Agent:
    """Return the agent of a worker for the engine at ``address``."""
    checksum = more.pop("checksum", None) or open_model(model).checksum()
    options = {"host": "other", "num_threads": 1, **more}
    return Agent(
        engine=address, tls=worker_tls(str(tls)), model=str(model), checksum=checksum, **options
    )


@contextlib.asynccontextmanager
async def running(agent: Agent) -> AsyncIterator[Agent]:
    """Run an agent for the block, and let it leave at the end."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(agent.run)
        yield agent
        agent.leave()


@contextlib.asynccontextmanager
async def open_mock_engine(
    model: Path, tls: Path, step: float = STEP, **options: Any
) -> AsyncIterator[Engine]:
    """Open an engine whose workers, here and on other hosts, compute nothing.

    With ``data_parallel_size=1`` it has one here, so that it opens before another one has joined.
    """
    options = {**ENGINE_OPTIONS, "worker_tls": str(tls), "data_parallel_size": 1, **options}
    async with open_engine(str(model), mock=MockSteps(step_seconds=step), **options) as engine:
        yield engine


async def ask(engine: Engine, count: int = 4, tokens: int = TOKENS) -> list[list[int]]:
    """Return the tokens of ``count`` requests at a time, each with a prompt of its own."""
    found: dict[int, list[int]] = {}

    async def ask_one(number: int) -> None:
        completion = await engine.complete(
            [7, 9, number + 1], max_tokens=tokens, ignore_eos=True, min_tokens=tokens
        )
        found[number] = list(completion.outputs[0].token_ids)

    async with trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(ask_one, number)
    return [found[number] for number in range(count)]


async def wait_states(engine: Engine, *states: str) -> None:
    """Block until the workers have these states, in the order of their numbers."""
    with trio.fail_after(60):
        while [each.state for each in engine.workers] != list(states):
            await trio.sleep(0.01)


def told(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    """Return the log lines that contain ``text``."""
    return [line for line in caplog.messages if text in line]


async def leave_at(leave: trio.Event, port: int, *, stream: bool) -> None:
    """Ask over a connection of its own, and close it at ``leave``."""
    body = {"prompt": [7, 9, 4], "max_tokens": LONG, "ignore_eos": True, "stream": stream}
    data = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    async with await trio.open_tcp_stream("127.0.0.1", port) as connection:
        await connection.send_all(head.encode() + data)
        if stream:
            assert (await connection.receive_some()).startswith(b"HTTP/1.1 200")
        await leave.wait()
