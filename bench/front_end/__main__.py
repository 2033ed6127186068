"""The yardstick for a front end: 32 tokens in, 512 out, 1,024 at a time, and no model.

``python -m bench.front_end`` measures HTTP, tokenizing, scheduling, the way to a worker and back,
detokenizing and server-sent events, beside vLLM's whole Python front end over a worker of the same
kind. Each token is an event of its own: a run in which a server has joined more than a few doesn't
count, and its steps are made longer until it has not. The client is a process on the last core,
the server has all others.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import attrs
import msgspec
import trio

from bench.front_end.client import Load, Seen
from bench.peers.environments import KEPT, installed_versions
from bench.peers.model_files import hugging_face_folder
from bench.peers.servers import FIELDS, make_vllm
from bench.report import Made, Rounds, Verdict, in_turns, markdown, own_versions, script
from bench.servers import MODEL, Running, Server, ServerFailed, exact_prompts, running, tokenizer
from gpu.mock import TEXT
from trioserve.load.figures import spread_of

_ROOT = Path(__file__).resolve().parents[2]
_FIELDS = {"model": MODEL, **FIELDS}
MOST_TOKENS_PER_EVENT = 1.05
"""A server that is behind sends several tokens in one event. More than this isn't a valid run."""
ENGINE, FRONT_END, WORKER = "engine", "front end", "worker"
"""The roles of a server's processes; front ends are numbered."""
_SLOWER, _MOST_STEPS = 1.3, 12
At = Callable[[float], AbstractAsyncContextManager[Running]]
"""Opens a server whose steps take so many seconds."""
PROMPT_TOKENS, OUTPUT_TOKENS, PROBE_TOKENS, REQUESTS_PER_STREAM = 32, 512, 96, 2
TARGET = 3.0
"""So many times the peer's tokens per second."""
_COLUMNS = {
    "step ms": "{step_ms:.1f}",
    "tokens/s": "{tokens_per_second:.0f}",
    "requests/s": "{requests_per_second:.1f}",
    "tokens per event": "{tokens_per_event:.3f}",
    "TTFT mean · p50 · p99 ms": "{ttft_mean_ms:.0f} · {ttft_p50_ms:.0f} · {ttft_p99_ms:.0f}",
    "gap p50 · p99 ms": "{gap_p50_ms:.0f} · {gap_p99_ms:.0f}",
    "server's CPU µs per token": "{server_us:.1f}",
    "client's core used": "{client_core_used:.0%}",
}


class InvalidRun(Exception):
    """A server failed, or can't send every token by itself at any pace that was tried."""


@attrs.frozen(kw_only=True)
class Workload:
    """The requests to a server, over so many streams at a time, and what it is started with."""

    streams: int
    requests: int
    output_tokens: int
    front_ends: int = 1
    seed: int = 0

    def bodies(self) -> list[str]:
        """Return the requests' bodies; no two prompts are the same."""
        prompts = exact_prompts(self.requests, PROMPT_TOKENS, self.seed)
        more = {**_FIELDS, "max_tokens": self.output_tokens, "stream": True}
        return [json.dumps({**more, "prompt": prompt}) for prompt in prompts]

    @property
    def limits(self) -> list[str]:
        """Both servers' options: room for all decodes and a good part of the prompts in a step."""
        batch = max(8192, 2 * self.streams)
        limits = ["--max-num-seqs", self.streams, "--max-num-batched-tokens", batch]
        return [*map(str, limits), "--max-model-len", "1024"]


def cores() -> tuple[list[int], list[int]]:
    """Return the servers' cores and the client's: the last one, where there are two."""
    every = sorted(os.sched_getaffinity(0))
    return (every[:-1], every[-1:]) if len(every) > 1 else (every, every)


def _pinned(command: list[str], port: int) -> list[str]:
    return ["taskset", "-c", ",".join(map(str, cores()[0])), *command, "--port", str(port)]


@contextlib.asynccontextmanager
async def own(load: Workload) -> AsyncIterator[At]:
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
        return running(server)

    yield at


@contextlib.asynccontextmanager
async def vllm(load: Workload) -> AsyncIterator[At]:
    """Yield vLLM's own front end and engine core over :mod:`.vllm_executor`, started once."""
    python, folder = make_vllm(), hugging_face_folder()
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
    with tempfile.NamedTemporaryFile() as step_file:
        step = Path(step_file.name)
        step.write_text("0")
        env |= {"MOCK_STEP_FILE": step_file.name, "MOCK_TOKENS": ",".join(map(str, tokens))}
        server = Server(
            name="vllm",
            argv=lambda port: _pinned(command, port),
            fields=_FIELDS,
            versions=installed_versions(python, "vllm-cpu", "torch"),
            env=env,
        )
        async with running(server) as up:

            @contextlib.asynccontextmanager
            async def at(seconds: float) -> AsyncIterator[Running]:
                step.write_text(str(seconds))
                yield up

            yield at


async def fastest(name: str, at: At, load: Workload, probe: Workload) -> dict[str, float]:
    """Return the figures of ``load`` with the shortest step time at which no events are joined.

    Step times are tried with ``probe``, from none on, and then from what a step costs the server.
    """
    step = 0.0
    for _ in range(_MOST_STEPS):
        async with at(step) as up:
            tried = await once(up, step, probe)
            if tried["tokens_per_event"] <= MOST_TOKENS_PER_EVENT:
                found = await once(up, step, load)
                if found["tokens_per_event"] <= MOST_TOKENS_PER_EVENT:
                    return found
        step = step * _SLOWER or load.streams * tried["server_us"] / 1e6
    raise InvalidRun(f"{name} joins events at {load.streams} streams even at {step * 1e3:.0f} ms")


async def once(up: Running, step: float, load: Workload) -> dict[str, float]:
    """Run ``load`` once against a server that is up, and return the figures.

    Times are milliseconds, processor time microseconds for each token of output: the server's, and
    that of each process of this project's server by its role. Where ``client_core_used`` is 1, the
    client is what was measured.
    """
    work = Load(
        **{"host": "127.0.0.1", "port": up.port, "path": up.server.path},
        **{"streams": load.streams, "bodies": load.bodies(), "cores": cores()[1]},
    )
    before = {"server_us": up.family.cpu_seconds(), **_by_process(up)}
    command, given = [sys.executable, "-m", "bench.front_end.client"], msgspec.json.encode(work)
    client = await trio.run_process(command, stdin=given, capture_stdout=True)
    used = {"server_us": up.family.cpu_seconds(), **_by_process(up)}
    seen = msgspec.json.decode(client.stdout, type=Seen)
    if (seen.requests, seen.tokens) != (load.requests, load.requests * load.output_tokens):
        raise InvalidRun(f"{up.server.name} gave {seen.tokens} tokens in {seen.requests} answers")
    first, gaps = spread_of(seen.ttft), spread_of(seen.gaps)
    return {
        "step_ms": step * 1e3,
        "tokens_per_second": seen.tokens / seen.duration,
        "requests_per_second": seen.requests / seen.duration,
        "tokens_per_event": seen.tokens / seen.events,
        "ttft_mean_ms": first.mean,
        "ttft_p50_ms": first.p50,
        "ttft_p99_ms": first.p99,
        "gap_p50_ms": gaps.p50,
        "gap_p99_ms": gaps.p99,
        "client_core_used": seen.cpu_seconds / seen.duration,
        **{name: 1e6 * (used[name] - before.get(name, 0.0)) / seen.tokens for name in used},
    }


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


_CONTENDERS = {"trioserve": own, "vllm": vllm}


async def measure_all(cases: Sequence[tuple[int, str, int]], rounds: int) -> Rounds:
    """Measure cases of streams, server and front ends; every other round goes backwards."""
    found = Rounds()
    for round, (streams, name, front_ends) in in_turns(rounds, cases):
        load = Workload(
            streams=streams,
            requests=streams * REQUESTS_PER_STREAM,
            output_tokens=OUTPUT_TOKENS,
            front_ends=front_ends,
            seed=2 * round,
        )
        # Prompts that a prefix cache doesn't know.
        few = {"requests": streams, "output_tokens": PROBE_TOKENS}
        probe = attrs.evolve(load, seed=load.seed + 1, **few)
        async with _CONTENDERS[name](load) as at:
            server = name if front_ends == 1 else f"{name}, {front_ends} front ends"
            found.add((streams, server), **await fastest(name, at, load, probe))
    return found


def table(found: Rounds) -> str:
    """Return a row for each width and server, medians over the rounds."""
    lines = [
        [*case, *(form.format(**of) for form in _COLUMNS.values())]
        for case, of in found.medians().items()
    ]
    return markdown(["streams", "server", *_COLUMNS], lines)


def processes(found: Rounds) -> str:
    """Return what each process of this project's server takes for a token, and what that bounds.

    A machine with a core for each process reaches at most the rate at which the busiest fills one.
    The worker isn't counted: in its place is what a model takes.
    """
    lines = []
    for case, of in found.medians().items():
        if ENGINE in of:
            front_ends = [of[name] for name in of if name.startswith(FRONT_END)]
            shown = " · ".join(f"{used:.1f}" for used in front_ends) or "—"
            bound = f"{1e6 / max(of[ENGINE], *front_ends, 1e-9):.0f}"
            lines.append([*case, f"{of[ENGINE]:.1f}", shown, f"{of[WORKER]:.1f}", bound])
    heads = ["streams", "server", "engine process CPU µs per token", "front ends", "mock worker"]
    last = "bound by the busiest, without the worker: tokens/s (not measured)"
    return markdown([*heads, last], lines)


def verdicts(found: Rounds) -> list[Verdict]:
    """Compare tokens per second with vLLM's, the median of the rounds, at each width."""
    of = {"against": "vLLM's Python front end", "bound": TARGET}
    both = [(streams, server) for streams, server in found.medians() if server == "vllm"]
    return [
        Verdict(
            what=f"tokens/s over a mock, {streams} streams",
            reached=found.ratio((streams, "trioserve"), (streams, peer), "tokens_per_second"),
            **of,
        )
        for streams, peer in both
        if (streams, "trioserve") in found.medians()
    ]


@script
async def measure(
    *,
    streams: Sequence[int] = (64, 256, 1024),
    front_ends: Sequence[int] = (1,),
    servers: Sequence[str] = tuple(_CONTENDERS),
    rounds: int = 1,
) -> Made:
    """Return both tables and the verdicts."""
    cases = [
        (width, name, count)
        for width, name in itertools.product(streams, servers)
        for count in (front_ends if name == "trioserve" else [1])
    ]
    try:
        found = await measure_all(cases, rounds)
    except (InvalidRun, ServerFailed, subprocess.CalledProcessError) as failure:
        return Made(f"bench: {failure}", {"failures": [str(failure)]}, status=1)
    versions: dict[str, dict[str, str]] = {"trioserve": own_versions()}
    if "vllm" in servers:
        python = KEPT / "vllm" / "bin" / "python"
        versions["vllm"] = installed_versions(python, "vllm-cpu", "torch")
    facts = {
        "cores": dict(zip(("servers", "client"), cores(), strict=True)),
        "versions": versions,
        "verdicts": [attrs.asdict(verdict) for verdict in verdicts(found)],
    }
    return Made(f"{table(found)}\n\n{processes(found)}", facts)
