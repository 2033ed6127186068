"""The GPU's idle share behind HTTP: a served model, and streaming clients in another process.

The server's own counters tell what its worker computed and waited for:
``trioserve:worker_step_seconds`` and ``trioserve:worker_idle_seconds``. They are read several times
a second; what counts is the time in which all streams run.
"""

from __future__ import annotations

import json
import random
import shutil
import string
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
import msgspec
import torch
import trio
from prometheus_client.parser import text_string_to_metric_families

from bench.front_end.client import Load, Seen
from bench.kernels.report import Row
from bench.kernels.targets import IDLE_SHARE
from bench.random_model import LLAMA_8B, TINY, write_model
from bench.servers import Running, Server, get, running
from trioserve.load.figures import spread_of
from trioserve.model_files import ModelConfig

_MODEL = "random"
# Of the time in which all streams run, this much at the beginning is left out: prompts come in.
_LEAD_IN = 0.2
_COUNTERS = {
    "running": "num_requests_running",
    "steps": "worker_steps_total",
    "step_seconds": "worker_step_seconds_total",
    "idle_seconds": "worker_idle_seconds_total",
    "tokens": "generation_tokens_total",
}
Sample = Mapping[str, float]
"""The server's counters at one moment, ``at`` that time of trio's clock."""


@attrs.frozen
class EngineLoad:
    """The model, the clients and their requests."""

    config: ModelConfig
    streams: int
    prompt_tokens: int
    output_tokens: int
    sample_seconds: float
    flags: str


_ON_GPU = EngineLoad(LLAMA_8B, 256, 128, 768, 0.2, "--device cuda --max-model-len 2048")
# A second or two in all.
_EMULATED = EngineLoad(TINY, 4, 12, 400, 0.01, "--device cpu --dtype float32 --num-threads 1")


def measure_engine(on: str) -> list[Row]:
    """Serve a random model to clients; return what the server's counters tell."""
    on_gpu = on == "gpu"
    load = _ON_GPU if on_gpu else _EMULATED
    # The model takes 16 GB: it is written where there is most room, memory or disk.
    places = [path for path in (Path("/dev/shm"), Path(tempfile.gettempdir())) if path.is_dir()]
    place = max(places, key=lambda path: shutil.disk_usage(path).free)
    with tempfile.TemporaryDirectory(dir=place) as folder:
        model = Path(folder) / _MODEL
        print("writing a model with random weights", flush=True)
        write_model(load.config, model, torch.device("cuda" if on_gpu else "cpu"))
        if on_gpu:
            torch.cuda.empty_cache()
        found, seen = trio.run(_serve, load, model)
    row: Row = {"streams": load.streams, "result": "served"}
    if not on_gpu:
        return [row]
    gaps, idle = spread_of(seen.gaps), found["idle_share"]
    row |= {"step ms": found["step_seconds"] * 1e3, "GPU idle": f"{idle:.1%}"}
    row |= {"tokens/s": found["tokens_per_second"], "ITL p50 ms": gaps.p50, "ITL p99 ms": gaps.p99}
    verdict = "met" if idle < IDLE_SHARE else "MISSED"
    return [{**row, "target": f"idle < {IDLE_SHARE:.0%}: {verdict}", "steady": found}]


async def _serve(load: EngineLoad, model: Path) -> tuple[dict[str, float], Seen]:
    server = Server(
        name="trioserve",
        argv=lambda port: [
            *(sys.executable, "-m", "trioserve", "serve", str(model), "--port", str(port)),
            *("--served-model-name", _MODEL, "--max-num-seqs", str(load.streams)),
            *("--log-level", "warning", *load.flags.split()),
        ],
        fields={},
        versions={},
    )
    async with running(server) as up:
        print("warming up", flush=True)
        await _clients(up, attrs.evolve(load, output_tokens=8), seed=1000)
        print(f"{load.streams} streams", flush=True)
        samples: list[Sample] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_watch, up, load, samples)
            seen = await _clients(up, load, seed=0)
            nursery.cancel_scope.cancel()
    return steady(samples, load.streams), seen


async def _watch(up: Running, load: EngineLoad, samples: list[Sample]) -> None:
    while True:
        metrics = parse_metrics((await get(up.port, "/metrics"))[1])
        found = {field: metrics[f"trioserve:{name}"] for field, name in _COUNTERS.items()}
        samples.append({"at": trio.current_time(), **found})
        await trio.sleep(load.sample_seconds)


def parse_metrics(text: str) -> dict[str, float]:
    """Return samples of Prometheus' text format by name, without those that have labels."""
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.keys() <= {"engine", "model_name"}
    }


def steady(samples: Sequence[Sample], streams: int) -> dict[str, float]:
    """Return what the worker did while all ``streams`` ran; raise if they never did for a while."""
    together = [sample for sample in samples if sample["running"] == streams]
    if together:
        length = together[-1]["at"] - together[0]["at"]
        together = [s for s in together if s["at"] >= together[0]["at"] + _LEAD_IN * length]
    if len(together) < 2 or together[-1]["steps"] == together[0]["steps"]:
        most = max((sample["running"] for sample in samples), default=0)
        raise RuntimeError(f"{streams} streams never ran together for a while (at most {most:.0f})")
    took = {name: together[-1][name] - figure for name, figure in together[0].items()}
    idle = took["idle_seconds"]
    return {
        "seconds": took["at"],
        "step_seconds": took["at"] / took["steps"],
        "idle_share": idle / (took["step_seconds"] + idle) if idle else 0.0,
        "tokens_per_second": took["tokens"] / took["at"],
    }


async def _clients(up: Running, load: EngineLoad, seed: int) -> Seen:
    """Send one request on each stream, from a process of its own; return what it read."""
    rng = random.Random(seed)
    fields = {"model": _MODEL, "temperature": 0.8, "ignore_eos": True, "stream": True}
    fields |= {"max_tokens": load.output_tokens, "stream_options": {"include_usage": True}}
    bodies = []
    for stream in range(load.streams):
        # As many letters as tokens to a model of bytes.
        prompt = "".join(rng.choices(string.ascii_letters, k=load.prompt_tokens))
        bodies.append(json.dumps({**fields, "prompt": prompt, "seed": seed + stream}))
    where = {"host": "127.0.0.1", "port": up.port, "path": up.server.path}
    work = Load(**where, streams=load.streams, bodies=bodies, cores=[])
    command = [sys.executable, "-m", "bench.front_end.client"]
    done = await trio.run_process(command, stdin=msgspec.json.encode(work), capture_stdout=True)
    return msgspec.json.decode(done.stdout, type=Seen)
