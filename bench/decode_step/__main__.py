"""Whole decode steps beside their floor: ``python -m bench.decode_step``.

A model of Llama-3.1-8B's shape with random weights, made on the device, runs through the worker's
own runner and executor at several batch sizes and contexts: with and without CUDA graphs, and with
one and two plans in flight. The floor is the weights and the KV cache read once at the card's copy
rate, measured in the same run, or the products at its matrix rate where that takes longer.

``--engine`` measures the whole server instead: a process that serves such a model to 256 streaming
HTTP clients, and the share of time that its GPU waits. ``--on emulation`` runs a tiny model through
the same code on the CPU and times nothing; with ``--engine`` it serves that model.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence

import attrs
import torch

from bench.decode_step.batch import DecodeBatch, StepTimes
from bench.decode_step.profile import KernelShare, profile_steps, shares_table
from bench.kernels.report import ResultFile, add_options, describe_ceilings, markdown_table
from bench.kernels.roofline import Ceilings, decode_step_parts
from bench.kernels.targets import DECODE_STEP, IDLE_SHARE
from bench.kernels.timing import measure_ceilings
from bench.random_model import LLAMA_8B, TINY, random_weights
from gpu.cuda.assembly import ServingLimits, assemble
from gpu.cuda.graphs import Capturer
from gpu.cuda.model_kernels import model_kernels
from gpu.cuda.timeline import HostTimeline, Timeline
from gpu.kernels import KernelLoader
from gpu.models.decoder import Decoder
from gpu.models.operations.cuda_ops import CudaOperations
from gpu.models.registry import build_model
from gpu.runner import Runner
from trioserve.model_files import ModelConfig

_DTYPE = torch.bfloat16
_PAGE_SIZE = 16
PROFILED_STEPS = 5


@attrs.frozen(kw_only=True)
class Scenario:
    """So many sequences of one context, and how many steps are timed."""

    rows: int
    context: int
    num_steps: int

    @property
    def title(self) -> str:
        """The scenario's name in tables."""
        thousands, rest = divmod(self.context, 1024)
        return f"{self.rows}x{thousands}k" if not rest else f"{self.rows}x{self.context}"


def _scenarios(*sizes: tuple[int, int, int]) -> list[Scenario]:
    return [Scenario(rows=rows, context=context, num_steps=steps) for rows, context, steps in sizes]


SCENARIOS = _scenarios((1, 1024, 200), (32, 1024, 150), (32, 8192, 80), (256, 1024, 80))
TINY_SCENARIOS = _scenarios((1, 20, 2), (3, 37, 2))


@attrs.frozen(kw_only=True)
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
        model, how = random_model(gpu.loader, LLAMA_8B), {"max_tokens": 8192}
        how |= {"timeline": gpu.timeline(), "capturer": gpu.capturer()}
        return cls(loader=gpu.loader, model=model, **how)

    @classmethod
    def emulated(cls) -> Stand:
        """Return the tiny shape on the CPU."""
        from gpu.kernels.emulation import EmulatedLoader

        loader = EmulatedLoader()
        how = {"timeline": HostTimeline(), "capturer": None, "max_tokens": 64}
        return cls(loader=loader, model=random_model(loader, TINY), **how)

    def limits(self, scenario: Scenario) -> ServingLimits:
        """Return limits with room for one scenario, with both runs of its steps."""
        longest = scenario.context + 2 * scenario.num_steps + 64
        return ServingLimits(
            max_model_len=longest,
            max_num_seqs=scenario.rows,
            max_num_batched_tokens=self.max_tokens,
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


@attrs.frozen(kw_only=True)
class Measured:
    """One scenario in one mode. ``context`` is that of the steps in the middle of the run."""

    scenario: Scenario
    graphs: bool
    in_flight: int
    context: int
    times: StepTimes
    prefill_tokens_per_second: float
    kernels: list[KernelShare]
    """The kernels of a step; empty unless it was profiled."""


def measure_scenario(
    stand: Stand, scenario: Scenario, *, graphs: bool, profile: bool = False
) -> list[Measured]:
    """Prefill the batch once, then time its steps with one and with two plans in flight.

    With ``profile`` some more steps show how long each kernel takes.
    """
    limits = stand.limits(scenario)
    executor, slots = assemble(stand.loader, stand.model, limits, stand.timeline)
    if graphs:
        assert stand.capturer is not None
        executor.capture(stand.capturer, scenario.rows, lambda done, total: None)
    runner = Runner(executor, slots, max_num_batched_tokens=limits.max_num_batched_tokens)
    sizes = {"page_size": limits.page_size, "num_pages": limits.num_pages, "plan_number": 0}
    contexts, vocab_size = [scenario.context] * scenario.rows, stand.model.config.vocab_size
    batch = DecodeBatch(runner, contexts, vocab_size=vocab_size, **sizes)
    seconds = batch.prefill(limits.max_num_batched_tokens)
    rate = scenario.rows * scenario.context / seconds
    measured = []
    for in_flight in (1, 2):
        before = batch.lengths[0]
        times = batch.decode(scenario.num_steps, in_flight=in_flight)
        how = {"scenario": scenario, "graphs": graphs, "in_flight": in_flight, "times": times}
        middle = (before + batch.lengths[0]) // 2
        one = Measured(context=middle, prefill_tokens_per_second=rate, kernels=[], **how)
        measured.append(one)
    if profile:
        more = PROFILED_STEPS - 1
        found = profile_steps(lambda: batch.decode(more, in_flight=1, warm_up=1), PROFILED_STEPS)
        measured[-1] = attrs.evolve(measured[-1], kernels=found)
    batch.close()
    return measured


def measure_all(
    stand: Stand,
    scenarios: Sequence[Scenario],
    deadline: float,
    save: Callable[[Sequence[Measured]], None],
) -> tuple[list[Measured], list[str]]:
    """Measure every scenario in every mode; return also what was left out for want of time.

    ``save`` gets all that is measured after each of them.
    """
    measured: list[Measured] = []
    left_out: list[str] = []
    for scenario in scenarios:
        for graphs in (True, False) if stand.capturer else (False,):
            name = f"{scenario.title} {'graphs' if graphs else 'eager'}"
            if time.monotonic() > deadline:
                left_out.append(name)
                continue
            began = time.monotonic()
            profile = stand.capturer is not None and not graphs
            measured += measure_scenario(stand, scenario, graphs=graphs, profile=profile)
            print(f"{name} [{time.monotonic() - began:.1f} s]", flush=True)
            save(measured)
            gc.collect()
            if stand.capturer:
                torch.cuda.empty_cache()
    return measured, left_out


def floor_of(measured: Measured, config: ModelConfig, ceilings: Ceilings) -> float:
    """Return the seconds that a step takes at least."""
    contexts = [measured.context] * measured.scenario.rows
    return ceilings.floor_of_parts(decode_step_parts(config, contexts))


def table(measured: Sequence[Measured], config: ModelConfig, ceilings: Ceilings | None) -> str:
    """Return a row for each scenario and mode; without ceilings, only that each one ran."""
    if ceilings is None:
        rows = [[one.scenario.title, str(one.in_flight), "ran"] for one in measured]
        return markdown_table(["batch", "in flight", "result"], rows)
    head = ["batch", "launched", "in flight", "floor ms", "step ms", "floors", "GPU idle"]
    head += ["device ms", "submit ms", "tokens/s", "prefill tokens/s", "targets"]
    return markdown_table(head, [_row(one, config, ceilings) for one in measured])


def _row(one: Measured, config: ModelConfig, ceilings: Ceilings) -> list[str]:
    floor, times = floor_of(one, config, ceilings), one.times
    how = [one.scenario.title, "graphs" if one.graphs else "eager", str(one.in_flight)]
    ratios = [f"{times.step / floor:.2f}", f"{times.idle_share:.1%}"]
    ms = [f"{seconds * 1e3:.2f}" for seconds in (floor, times.step, times.device, times.submit)]
    rates = [one.scenario.rows / times.step, one.prefill_tokens_per_second]
    shown = [*ms[:2], *ratios, *ms[2:], *(f"{rate:.0f}" for rate in rates)]
    return [*how, *shown, _verdict(one, times.step / floor)]


def _verdict(one: Measured, floors: float) -> str:
    """Return the verdict on what is served with: graphs, and two plans in flight."""
    if not one.graphs or one.in_flight != 2:
        return ""
    step = "met" if floors <= DECODE_STEP else "MISSED"
    idle = "met" if one.times.idle_share < IDLE_SHARE else "MISSED"
    return f"≤ {DECODE_STEP:.2f} floors: {step}; idle < {IDLE_SHARE:.0%}: {idle}"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m bench.decode_step", description=__doc__, formatter_class=raw
    )
    add = parser.add_argument
    titles = [scenario.title for scenario in (*SCENARIOS, *TINY_SCENARIOS)]
    only = "this batch alone, such as 32x1k; may be given several times"
    add("--scenario", action="append", choices=titles, metavar="TITLE", help=only)
    add("--engine", action="store_true", help="the idle share behind HTTP clients")
    add("--streams", type=int, help="HTTP clients of --engine (default: 256, or 4 emulated)")
    add_options(parser, seconds=400)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, save the results. The exit status is 1 if anything was left out."""
    options = _options(arguments)
    on_gpu = options.on == "gpu"
    if on_gpu and not torch.cuda.is_available():
        print("bench.decode_step: no GPU was found; --on emulation runs the same code without one")
        return 1
    if options.engine:
        from bench.decode_step.engine import measure_engine

        return measure_engine(on_gpu=on_gpu, streams=options.streams, out=options.out)
    deadline = time.monotonic() + options.seconds
    ceilings = measure_ceilings() if on_gpu else None
    if ceilings:
        print(describe_ceilings(ceilings), flush=True)
    stand = Stand.on_gpu() if on_gpu else Stand.emulated()
    scenarios = [
        scenario
        for scenario in (SCENARIOS if on_gpu else TINY_SCENARIOS)
        if not options.scenario or scenario.title in options.scenario
    ]
    config = stand.model.config
    result = ResultFile.start(options.out, "decode-step" if on_gpu else "decode-step-emulated")

    def save(measured: Sequence[Measured]) -> None:
        text, details = table(measured, config, ceilings), _details(measured, config, ceilings)
        result.save(ceilings=ceilings, table=text, details=details)

    measured, left_out = measure_all(stand, scenarios, deadline, save)
    for one in measured:
        if one.kernels:
            print(f"\n{one.scenario.title}\n{shares_table(one.kernels)}")
    print(f"\n{table(measured, config, ceilings)}\n")
    print(f"saved to {result.path}")
    if left_out:
        print(f"not run: {', '.join(left_out)}")
    return 1 if left_out else 0


def _details(
    measured: Sequence[Measured], config: ModelConfig, ceilings: Ceilings | None
) -> dict[str, object]:
    return {
        "steps": [
            {
                **attrs.asdict(one),
                "times": attrs.asdict(one.times) if ceilings else None,
                "prefill_tokens_per_second": one.prefill_tokens_per_second if ceilings else None,
                "idle_share": one.times.idle_share if ceilings else None,
                "floor_seconds": floor_of(one, config, ceilings) if ceilings else None,
            }
            for one in measured
        ]
    }


if __name__ == "__main__":
    sys.exit(main())
