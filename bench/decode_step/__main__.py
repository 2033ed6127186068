"""Whole decode steps beside their floor: ``python -m bench.decode_step``.

A model of Llama-3.1-8B's shape with random weights, made on the device, runs through the worker's
own runner and executor at several batch sizes and contexts: with and without CUDA graphs, and with
one and two plans in flight. The floor is the weights and the KV cache read once at the card's copy
rate, measured in the same run, or the products at its matrix rate where that takes longer.

``--engine`` measures the whole server instead: a process that serves such a model to 256 streaming
HTTP clients, and the share of time that its GPU waits. ``--on emulation`` runs a tiny model through
the same code on the CPU and times nothing; with ``--engine`` it serves that model.

``--scenario 32x1k`` measures this batch alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

import attrs
import torch

from bench.decode_step.batch import DecodeBatch, StepTimes, profile_steps
from bench.decode_step.engine import measure_engine
from bench.kernels.report import Row, gpu_options, run_jobs
from bench.kernels.roofline import Ceilings, decode_step_parts
from bench.kernels.targets import DECODE_STEP, IDLE_SHARE
from bench.kernels.timing import measure_ceilings
from bench.random_model import LLAMA_8B, TINY, random_weights
from bench.report import table_of
from gpu.cuda.assembly import ServingLimits, assemble
from gpu.cuda.graphs import Capturer
from gpu.cuda.model_kernels import model_kernels
from gpu.cuda.timeline import HostTimeline, Timeline
from gpu.kernels import KernelLoader
from gpu.kernels.emulation import EmulatedLoader
from gpu.models.decoder import Decoder
from gpu.models.operations.cuda_ops import CudaOperations
from gpu.models.registry import build_model
from gpu.runner import Runner
from trioserve.model_files import ModelConfig

_DTYPE = torch.bfloat16
_PAGE_SIZE = 16
PROFILED_STEPS = 5


@attrs.frozen
class Scenario:
    """So many sequences of one context, and how many steps are timed."""

    title: str
    rows: int
    context: int
    num_steps: int


SCENARIOS = [
    Scenario("1x1k", 1, 1024, 200),
    Scenario("32x1k", 32, 1024, 150),
    Scenario("32x8k", 32, 8192, 80),
    Scenario("256x1k", 256, 1024, 80),
]
TINY_SCENARIOS = [Scenario("1x20", 1, 20, 2), Scenario("3x37", 3, 37, 2)]


@attrs.frozen
class Stand:
    """A model on a device, and what else an executor is assembled from."""

    loader: KernelLoader
    model: Decoder
    timeline: Timeline
    capturer: Capturer | None
    """None in the emulation, which has no graphs and whose times mean nothing."""
    max_tokens: int

    @classmethod
    def on_gpu(cls) -> Stand:
        """Llama-3.1-8B's shape on the GPU, where this thread gets a stream of its own."""
        from gpu.cuda.device import CudaDevice

        gpu = CudaDevice(torch.device("cuda", torch.cuda.current_device()))
        sources = model_kernels(
            LLAMA_8B, dtype=_DTYPE, cache_dtype=_DTYPE, may_share=True, serves_adapters=False
        )
        gpu.build(sources, lambda done, total: None)
        model = random_model(gpu.loader, LLAMA_8B)
        return cls(gpu.loader, model, gpu.timeline(), gpu.capturer(), max_tokens=8192)

    @classmethod
    def emulated(cls) -> Stand:
        """Return the tiny shape on the CPU."""
        loader = EmulatedLoader()
        return cls(loader, random_model(loader, TINY), HostTimeline(), None, max_tokens=64)


def limits_of(scenario: Scenario, max_tokens: int) -> ServingLimits:
    """Return limits with room for one scenario, with both runs of its steps."""
    longest = scenario.context + 2 * scenario.num_steps + 64
    return ServingLimits(
        max_model_len=longest,
        max_num_seqs=scenario.rows,
        max_num_batched_tokens=max_tokens,
        page_size=_PAGE_SIZE,
        num_pages=scenario.rows * -(-longest // _PAGE_SIZE),
        kv_cache_dtype="auto",
        max_logprobs=1,
        logprobs_mode="raw",
        batch_invariant_attention=False,
    )


def random_model(loader: KernelLoader, config: ModelConfig) -> Decoder:
    """Return ``config`` with random weights, where ``loader`` runs kernels."""
    sizes = {"hidden_size": config.hidden_size, "mlp_sizes": config.mlp_sizes}
    operations = CudaOperations(loader, dtype=_DTYPE, **sizes)
    return build_model(config, random_weights(config, loader.device, _DTYPE), operations)


def measure_scenario(
    stand: Stand, scenario: Scenario, ceilings: Ceilings | None, *, graphs: bool
) -> list[Row]:
    """Prefill the batch once, then time its steps with one and with two plans in flight.

    Some more steps without graphs show how long each kernel takes. Without ceilings a row says
    only that its steps ran.
    """
    limits = limits_of(scenario, stand.max_tokens)
    executor, slots = assemble(stand.loader, stand.model, limits, stand.timeline)
    if graphs:
        assert stand.capturer is not None
        executor.capture(stand.capturer, scenario.rows, lambda done, total: None)
    batch = DecodeBatch(
        Runner(executor, slots, max_num_batched_tokens=limits.max_num_batched_tokens),
        context=scenario.context,
        limits=limits,
        vocab_size=stand.model.config.vocab_size,
    )
    prefill_rate = scenario.rows * scenario.context / batch.prefill()
    rows: list[Row] = []
    for in_flight in (1, 2):
        before = batch.computed[0]
        times = batch.decode(scenario.num_steps, in_flight=in_flight)
        row: Row = {"batch": scenario.title, "launched": "graphs" if graphs else "eager"}
        row |= {"in flight": in_flight, "result": "ran"}
        if ceilings:
            # The context of the steps in the middle of the run.
            contexts = [(before + batch.computed[0]) // 2] * scenario.rows
            floor = ceilings.floor(*decode_step_parts(stand.model.config, contexts))
            row |= {**figures(times, floor), "tokens/s": scenario.rows / times.step}
            row |= {"prefill tokens/s": prefill_rate}
            # The verdict is on what is served with.
            row["targets"] = verdict(times, floor) if graphs and in_flight == 2 else ""
        rows.append(row)
    if ceilings and not graphs:
        more = PROFILED_STEPS - 1
        found = profile_steps(lambda: batch.decode(more, in_flight=1, warm_up=1), PROFILED_STEPS)
        print(table_of(list(found.values())[:12]))
        rows[-1]["kernels"] = found
    return rows


def figures(times: StepTimes, floor: float) -> Row:
    """Return the columns of a step's times."""
    return {
        "floor ms": floor * 1e3,
        "step ms": times.step * 1e3,
        "floors": times.step / floor,
        "GPU idle": f"{times.idle_share:.1%}",
        "device ms": times.device * 1e3,
        "submit ms": times.submit * 1e3,
    }


def verdict(times: StepTimes, floor: float) -> str:
    """Return the verdicts on a step's targets."""
    step = "met" if times.step / floor <= DECODE_STEP else "MISSED"
    idle = "met" if times.idle_share < IDLE_SHARE else "MISSED"
    return f"≤ {DECODE_STEP:.2f} floors: {step}; idle < {IDLE_SHARE:.0%}: {idle}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, save the results. The exit status is 1 if anything was left out."""
    options = gpu_options(__doc__, arguments, seconds=400.0, scenario=[], engine=False)
    if options.engine:
        run_jobs(options, "engine-idle", {"engine": partial(measure_engine, options.on)})
        return 0
    scenarios = SCENARIOS if options.on == "gpu" else TINY_SCENARIOS
    ceilings = measure_ceilings() if options.on == "gpu" else None
    stand = Stand.on_gpu() if ceilings else Stand.emulated()
    jobs = {
        f"{scenario.title} {'graphs' if graphs else 'eager'}": partial(
            measure_scenario, stand, scenario, ceilings, graphs=graphs
        )
        for scenario in scenarios
        if scenario.title in options.scenario or not options.scenario
        for graphs in ((True, False) if stand.capturer else (False,))
    }
    rows, whole = run_jobs(options, "decode-step", jobs, ceilings)
    return 0 if rows and whole else 1


if __name__ == "__main__":
    sys.exit(main())
