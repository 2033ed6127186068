"""Each kernel beside its floor and its peers: ``python -m bench.kernels``.

The card's own copy and matrix rates are measured in the same run. Every contestant is checked
against a float64 reference on the same inputs before any is timed; then all of a case are measured
in turn, three times over. A peer that is not installed or does not offer a case is named.
``--on emulation`` runs the same code over tiny shapes on the CPU, which times nothing.
``--kernel NAME`` runs one kernel's cases.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from bench.kernels import attention, fused, lora, sampling
from bench.kernels.case import Case, PeerAbsent, Setting
from bench.kernels.report import Row, gpu_options, run_jobs
from bench.kernels.roofline import Ceilings
from bench.kernels.targets import OURS
from bench.kernels.timing import Recording, measure_ceilings, measure_in_turn, record
from gpu.kernels.catalogue import sources
from gpu.kernels.emulation import EmulatedLoader
from gpu.kernels.nvrtc import KernelBuildError


def measure(case: Case, setting: Setting) -> Row:
    """Check and time one case, and return its row. Failures are in the result.

    ``seconds`` are medians over the rounds, ``errors`` distances from the reference. ``notes`` say
    why a peer is missing, and what failed.
    """
    recordings: dict[str, Recording | None] = {}
    errors: dict[str, float] = {}
    notes: dict[str, str] = {}
    timed = setting.device.type == "cuda"
    try:
        makers = case.make(setting)
    except Exception as error:  # one case's failure is no reason to lose the others
        makers, notes[OURS] = {}, f"failed: {_one_line(error)}"
    for name, make in makers.items():
        try:
            contestant = make()
            errors[name] = contestant.error()
            if not errors[name] <= contestant.tolerance:
                notes[name] = f"wrong: error {errors[name]:.2g} over {contestant.tolerance:g}"
                continue
            recordings[name] = record(contestant.launches) if timed else None
        except PeerAbsent as absent:
            notes[name] = f"absent: {absent}"
        except Exception as error:  # a library that is not ours fails in ways of its own
            notes[name] = f"failed: {_one_line(error)}"
    ready = {name: each for name, each in recordings.items() if each}
    notes |= {name: "eager: no graph" for name, each in ready.items() if each.how == "eager"}
    times = measure_in_turn(list(ready.values()))
    seconds = {name: statistics.median(each) for name, each in zip(ready, times, strict=True)}
    print("; ".join(f"{name} {note}" for name, note in notes.items()))
    row = {"kernel": case.kernel, "shape": case.shape}
    row["result"] = "right" if OURS in recordings else "FAILED"
    return {**row, "seconds": seconds, "errors": errors, "notes": notes}


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:200]


def judge(case: Case, row: Row, ceilings: Ceilings, others: Mapping[str, float]) -> Row:
    """Return a row with the case's floor, its peers' times and the verdicts on its targets.

    ``others`` are our own times of the cases so far, by title.
    """
    floor, bound = ceilings.floor(case.work), ceilings.bound(case.work)
    seconds = {OURS: math.nan, **row["seconds"]}  # a kernel that failed misses its targets
    ours = seconds[OURS]
    peers = {name: note.partition(":")[0] for name, note in row["notes"].items()}
    peers |= {name: f"{time * 1e6:.1f}" for name, time in seconds.items()}
    rate = f"{case.work.bytes / ours / 1e12:.2f} TB/s"
    if bound == "matrix":
        rate = f"{case.work.flops / ours / 1e12:.0f} TFLOP/s"
    verdicts = [each.verdict(each.reached(floor, seconds, others)) for each in case.targets]
    return {
        **row,
        "bound": bound,
        "floor µs": floor * 1e6,
        "ours µs": ours * 1e6,
        "of floor": floor / ours,
        "rate": rate,
        "peers µs": ", ".join(f"{name} {text}" for name, text in peers.items() if name != OURS),
        "targets": "; ".join(verdicts),
    }


def _setting(on: str) -> Setting:
    if on != "gpu":
        generator = torch.Generator().manual_seed(0)
        return Setting(loader=EmulatedLoader(), generator=generator, cache_bytes=0)
    from gpu.kernels.device import DeviceLoader

    loader = DeviceLoader()
    try:
        loader.prepare(sources())  # side by side, and kept on disk for other processes
    except KernelBuildError as error:
        print(f"a kernel can't be built, and its cases will fail: {error}", flush=True)
    cache_bytes = torch.cuda.get_device_properties(loader.device).L2_cache_size
    generator = torch.Generator(device="cuda").manual_seed(0)
    return Setting(loader=loader, generator=generator, cache_bytes=cache_bytes)


def all_cases(*, tiny: bool) -> list[Case]:
    """Return every case, those that run first in front; ``tiny`` ones are for the emulation."""
    modules = (attention, fused, lora, sampling)
    every = [case for module in modules for case in module.cases(tiny=tiny)]
    return sorted(every, key=lambda case: not case.first)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases that were asked for. The exit status is 1 if one of our kernels failed."""
    options = gpu_options(__doc__, arguments, seconds=480.0, kernel=[])
    every = all_cases(tiny=options.on != "gpu")
    cases = [case for case in every if not options.kernel or case.kernel in options.kernel]
    setting, others = _setting(options.on), dict[str, float]()
    ceilings = measure_ceilings() if options.on == "gpu" else None

    def run(case: Case) -> list[Row]:
        row = measure(case, setting)
        if ceilings:
            row = judge(case, row, ceilings, others)
            others[case.title] = row["seconds"].get(OURS, math.nan)
        return [row]

    jobs = {case.title: partial(run, case) for case in cases}
    rows, whole = run_jobs(options, "kernels", jobs, ceilings)
    return 0 if whole and rows and all(row["result"] == "right" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
