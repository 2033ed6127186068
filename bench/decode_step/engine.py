"""The GPU's idle share behind HTTP: a served model, and streaming clients in other processes.

The server's own counters tell what its worker computed and waited for:
``trioserve:worker_step_seconds`` and ``trioserve:worker_idle_seconds``. They are read several times
a second; what counts is the time in which all streams run.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
import trio
from prometheus_client.parser import text_string_to_metric_families

from bench.decode_step.room import NoRoomError, folder_with_room, model_bytes, temporary_folders
from bench.kernels.report import ResultFile, markdown_table
from bench.kernels.targets import IDLE_SHARE
from bench.random_model import LLAMA_8B, TINY, write_model
from bench.servers import Running, Server, ServerFailed, get, running
from trioserve.model_files import ModelConfig

_MODEL = "random"
# Of the time in which all streams run, this much at the beginning is left out: prompts come in.
_LEAD_IN = 0.2


class ClientsFailed(Exception):
    """A client's request failed, or all streams never ran at once."""


@attrs.frozen(kw_only=True)
class EngineLoad:
    """The model, the clients and their requests."""

    config: ModelConfig
    streams: int
    processes: int
    prompt_tokens: int
    output_tokens: int
    sample_seconds: float
    flags: Sequence[str]

    @classmethod
    def on_gpu(cls, streams: int) -> EngineLoad:
        """Return the load of Llama-3.1-8B's shape."""
        flags = ["--device", "cuda", "--max-model-len", "2048", "--max-num-seqs", str(streams)]
        sizes = {"processes": 8, "prompt_tokens": 128, "output_tokens": 768}
        return cls(config=LLAMA_8B, streams=streams, sample_seconds=0.2, flags=flags, **sizes)

    @classmethod
    def tiny(cls, streams: int) -> EngineLoad:
        """Return the load of a tiny model on the CPU, a second or two in all."""
        flags = ["--device", "cpu", "--dtype", "float32", "--num-threads", "1"]
        sizes = {"processes": 2, "prompt_tokens": 12, "output_tokens": 400}
        return cls(config=TINY, streams=streams, sample_seconds=0.01, flags=flags, **sizes)


@attrs.frozen(kw_only=True)
class Sample:
    """The server's counters at one moment, in seconds and numbers since its start."""

    at: float
    running: int
    steps: float
    step_seconds: float
    idle_seconds: float
    tokens: float


@attrs.frozen(kw_only=True)
class Steady:
    """The figures between two samples."""

    seconds: float
    step_seconds: float
    idle_share: float
    tokens_per_second: float


def measure_engine(*, on_gpu: bool, streams: int | None, out: Path) -> int:
    """Serve a random model to clients, print and save; return 1 if that failed."""
    load = EngineLoad.on_gpu(streams or 256) if on_gpu else EngineLoad.tiny(streams or 4)
    try:
        place = folder_with_room(model_bytes(load.config), temporary_folders())
        with tempfile.TemporaryDirectory(dir=place) as folder:
            model = Path(folder) / _MODEL
            print("writing a model with random weights", flush=True)
            write_model(load.config, model, torch.device("cuda" if on_gpu else "cpu"))
            if on_gpu:
                torch.cuda.empty_cache()
            found, clients = trio.run(_serve, load, model, Path(folder) / "log")
    except (NoRoomError, ServerFailed, ClientsFailed) as failure:
        print(f"bench.decode_step: {failure}", file=sys.stderr)
        return 1
    text = _table(load, found, clients, timed=on_gpu)
    result = ResultFile.start(out, "engine-idle" if on_gpu else "engine-idle-emulated")
    details = {"streams": load.streams, "steady": attrs.asdict(found) if on_gpu else None}
    result.save(ceilings=None, table=text, details=details)
    print(f"\n{text}\n\nsaved to {result.path}")
    return 0


async def _serve(load: EngineLoad, model: Path, log: Path) -> tuple[Steady, list[dict[str, Any]]]:
    server = Server(
        name="trioserve",
        argv=lambda port: [
            *(sys.executable, "-m", "trioserve", "serve", str(model), "--port", str(port)),
            *("--served-model-name", _MODEL, "--log-level", "warning", *load.flags),
        ],
        fields={},
        versions={},
    )
    async with running(server, log) as up:
        print("warming up", flush=True)
        await _clients(up, attrs.evolve(load, output_tokens=8), seed=1000)
        print(f"{load.streams} streams", flush=True)
        samples: list[Sample] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_watch, up, load, samples)
            clients = await _clients(up, load, seed=0)
            nursery.cancel_scope.cancel()
    return steady(samples, load.streams), clients


async def _watch(up: Running, load: EngineLoad, samples: list[Sample]) -> None:
    while True:
        metrics = parse_metrics((await get(up.port, "/metrics"))[1])
        sample = Sample(
            at=trio.current_time(),
            running=int(metrics["trioserve:num_requests_running"]),
            steps=metrics["trioserve:worker_steps_total"],
            step_seconds=metrics["trioserve:worker_step_seconds_total"],
            idle_seconds=metrics["trioserve:worker_idle_seconds_total"],
            tokens=metrics["trioserve:generation_tokens_total"],
        )
        samples.append(sample)
        await trio.sleep(load.sample_seconds)


def parse_metrics(text: str) -> dict[str, float]:
    """Return samples of Prometheus' text format by name, without those that have labels."""
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.keys() <= {"engine", "model_name"}
    }


def steady(samples: Sequence[Sample], streams: int) -> Steady:
    """Return what the worker did while all ``streams`` ran; raise if they never did for a while."""
    together = [sample for sample in samples if sample.running == streams]
    if together:
        length = together[-1].at - together[0].at
        together = [s for s in together if s.at >= together[0].at + _LEAD_IN * length]
    if len(together) < 2 or together[-1].steps == together[0].steps:
        most = max((sample.running for sample in samples), default=0)
        raise ClientsFailed(f"{streams} streams never ran together for a while (at most {most})")
    first, last = together[0], together[-1]
    seconds = last.at - first.at
    busy, idle = last.step_seconds - first.step_seconds, last.idle_seconds - first.idle_seconds
    return Steady(
        seconds=seconds,
        step_seconds=seconds / (last.steps - first.steps),
        idle_share=idle / (busy + idle) if idle else 0.0,
        tokens_per_second=(last.tokens - first.tokens) / seconds,
    )


async def _clients(up: Running, load: EngineLoad, seed: int) -> list[dict[str, Any]]:
    """Run all streams, spread over processes; return what each of these printed."""
    shares = [len(range(i, load.streams, load.processes)) for i in range(load.processes)]
    shares = [share for share in shares if share]
    results: list[dict[str, Any]] = []
    num_ready, all_ready = 0, trio.Event()

    async def one(number: int, streams: int) -> None:
        nonlocal num_ready
        command = [sys.executable, "-m", "bench.decode_step.clients"]
        command += [f"http://127.0.0.1:{up.port}", "--model", _MODEL, "--streams", str(streams)]
        command += ["--seed", str(seed + 10_000 * number)]
        command += ["--prompt-tokens", str(load.prompt_tokens)]
        command += ["--output-tokens", str(load.output_tokens)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        start = functools.partial(trio.run_process, command, check=False, **pipes)
        said, is_told = b"", False
        async with trio.open_nursery() as nursery:
            process: trio.Process = await nursery.start(start)
            assert process.stdin is not None
            assert process.stdout is not None
            async for part in process.stdout:
                said += part
                if b"ready\n" in said and not is_told:
                    is_told = True
                    num_ready += 1
                    if num_ready == len(shares):
                        all_ready.set()
                    await all_ready.wait()
                    await process.stdin.send_all(b"\n")
        if process.returncode:
            raise ClientsFailed(f"the clients failed:\n{said.decode(errors='replace')[-1000:]}")
        results.append(json.loads(said.splitlines()[-1]))

    try:
        async with trio.open_nursery() as nursery:
            for number, streams in enumerate(shares):
                nursery.start_soon(one, number, streams)
    except* ClientsFailed as group:
        raise group.exceptions[0] from None
    return results


def _table(
    load: EngineLoad, found: Steady, clients: Sequence[dict[str, Any]], *, timed: bool
) -> str:
    if not timed:
        return markdown_table(["streams", "result"], [[str(load.streams), "served"]])
    p50, p99 = (max(client["figures"]["itl_ms"][p] for client in clients) for p in ("p50", "p99"))
    idle = "met" if found.idle_share < IDLE_SHARE else "MISSED"
    head = ["streams", "step ms", "GPU idle", "tokens/s", "ITL p50 ms", "ITL p99 ms", "target"]
    row = [str(load.streams), f"{found.step_seconds * 1e3:.2f}", f"{found.idle_share:.1%}"]
    row += [f"{found.tokens_per_second:.0f}", f"{p50:.1f}", f"{p99:.1f}"]
    return markdown_table(head, [[*row, f"idle < {IDLE_SHARE:.0%}: {idle}"]])
