"""Each kernel beside its floor and its peers: ``python -m bench.kernels``.

The card's own copy and matrix rates are measured in the same run. Every contestant is checked
against a float64 reference on the same inputs before any is timed; then all of a case are measured
in turn, three times over. A peer that is not installed or does not offer a case is named.
``--on emulation`` runs the same code over tiny shapes on the CPU, which times nothing.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from bench.kernels.all import all_cases
from bench.kernels.case import Case, Contestant, PeerAbsent, Setting
from bench.kernels.report import ResultFile, add_options, describe_ceilings, markdown_table
from bench.kernels.roofline import Ceilings
from bench.kernels.targets import Judged, Result, judge
from bench.kernels.timing import (
    DryRun,
    GraphStopwatch,
    Recording,
    Stopwatch,
    measure_ceilings,
    measure_in_turn,
)
from gpu.kernels.catalogue import sources
from gpu.kernels.emulation import EmulatedLoader
from gpu.kernels.nvrtc import KernelBuildError

OURS = "ours"


@attrs.frozen(kw_only=True)
class Measured:
    """The seconds of each contestant of a case in each round, and further facts.

    ``errors`` are distances from the reference. ``host`` is the time that handing over one of our
    launches takes in Python. ``notes`` say why a peer is missing, and what failed. Without ours in
    ``seconds`` the case failed.
    """

    case: Case
    seconds: dict[str, list[float]]
    errors: dict[str, float]
    notes: dict[str, str]
    host: float = math.nan

    @property
    def failed(self) -> bool:
        """True if our own kernel was wrong or did not run."""
        return OURS not in self.seconds

    @property
    def medians(self) -> dict[str, float]:
        """The median of each contestant over the rounds."""
        return {name: statistics.median(times) for name, times in self.seconds.items()}

    def result(self, ceilings: Ceilings) -> Result:
        """Return the figures that targets are judged by."""
        peers = self.medians
        seconds = peers.pop(OURS)
        floor = ceilings.floor(self.case.work)
        return Result(title=self.case.title, floor=floor, seconds=seconds, peers=peers)


def measure(case: Case, setting: Setting, stopwatch: Stopwatch) -> Measured:
    """Check and time one case. Failures are in the result."""
    recordings: dict[str, Recording] = {}
    errors: dict[str, float] = {}
    notes: dict[str, str] = {}

    def enter(name: str, contestant: Contestant) -> None:
        errors[name] = contestant.error()
        if not errors[name] <= contestant.tolerance:
            notes[name] = f"wrong: error {errors[name]:.2g} over {contestant.tolerance:g}"
            return
        recordings[name] = stopwatch.record(contestant.launches)
        if recordings[name].how == "eager":
            notes[name] = "timed from Python: it can't be captured in a graph"

    host, trial = math.nan, None
    try:
        trial = case.make(setting)
        enter(OURS, trial.ours)
        host = stopwatch.host_seconds(trial.ours.launches)
    except Exception as error:  # one kernel's failure is no reason to lose the others
        notes[OURS] = _one_line(error)
    for peer in trial.peers if trial else ():
        try:
            enter(peer.name, peer.make())
        except PeerAbsent as absent:
            notes[peer.name] = f"absent: {absent}"
        except Exception as error:  # a library that is not ours fails in ways of its own
            notes[peer.name] = f"failed: {_one_line(error)}"
    times = measure_in_turn(list(recordings.values()))
    seconds = dict(zip(recordings, times, strict=True))
    return Measured(case=case, seconds=seconds, errors=errors, notes=notes, host=host)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:200]


def run_cases(
    cases: Sequence[Case],
    setting: Setting,
    stopwatch: Stopwatch,
    seconds: float,
    save: Callable[[Sequence[Measured]], None],
) -> list[Measured]:
    """Measure ``cases`` one after the other; those that don't fit into ``seconds`` are left out.

    ``save`` gets all that is measured after each case.
    """
    deadline = time.monotonic() + seconds
    measured: list[Measured] = []
    for case in cases:
        if time.monotonic() > deadline:
            print(f"out of time: {len(cases) - len(measured)} cases were not run", flush=True)
            break
        began = time.monotonic()
        measured.append(one := measure(case, setting, stopwatch))
        gc.collect()
        if setting.device.type == "cuda":
            torch.cuda.empty_cache()
        said = [f"{name} {t * 1e6:.1f}" for name, t in one.medians.items() if not math.isnan(t)]
        said += [f"{name} {note}" for name, note in one.notes.items()]
        print(f"{case.title} [{time.monotonic() - began:.1f} s]: {'; '.join(said)}", flush=True)
        save(measured)
    return measured


def _judged(measured: Sequence[Measured], ceilings: Ceilings) -> dict[str, list[Judged]]:
    results = {one.case.title: one.result(ceilings) for one in measured if not one.failed}
    targets = {one.case.title: one.case.targets for one in measured if not one.failed}
    return {
        title: [judge(target, results[title], results) for target in of_case]
        for title, of_case in targets.items()
    }


def table(measured: Sequence[Measured], ceilings: Ceilings | None) -> str:
    """Return a row for each case. Without ceilings it tells only what was checked."""
    if ceilings is None:
        rows = [
            [one.case.kernel, one.case.shape, "FAILED" if one.failed else "right", _error(one)]
            for one in measured
        ]
        return markdown_table(["kernel", "shape", "result", "error"], rows)
    judged = _judged(measured, ceilings)
    rows = [_row(one, ceilings, judged.get(one.case.title, [])) for one in measured]
    head = ["kernel", "shape", "bound", "floor µs", "ours µs", "of floor", "rate", "peers µs"]
    return markdown_table([*head, "targets", "launch µs"], rows)


def summary(measured: Sequence[Measured], ceilings: Ceilings) -> str:
    """Return a narrow table for the end of the output: the fastest peer and the verdicts alone."""
    judged, rows = _judged(measured, ceilings), []
    for one in measured:
        title = f"{one.case.kernel} {one.case.shape}"
        if one.failed:
            rows.append([title, "", "FAILED", "", one.notes.get(OURS, "")[:60]])
            continue
        peers = one.medians
        seconds = peers.pop(OURS)
        best = min(peers, key=peers.__getitem__, default="")
        verdicts = {True: "met", False: "MISSED", None: "?"}
        share = f"{ceilings.floor(one.case.work) / seconds:.2f}"
        told = " ".join(verdicts[verdict.met] for verdict in judged[one.case.title])
        fastest = f"{best} {peers[best] * 1e6:.1f}" if best else ""
        rows.append([title, f"{seconds * 1e6:.1f}", share, fastest, told])
    return markdown_table(["case", "µs", "floor", "best peer", "targets"], rows)


def _error(one: Measured) -> str:
    return f"{one.errors[OURS]:.1e}" if OURS in one.errors else one.notes.get(OURS, "")


def _row(one: Measured, ceilings: Ceilings, judged: Sequence[Judged]) -> list[str]:
    work = one.case.work
    floor, bound = ceilings.floor(work), ceilings.bound(work)
    start = [one.case.kernel, one.case.shape, bound, f"{floor * 1e6:.1f}"]
    if one.failed:
        return [*start, "FAILED", "", "", one.notes.get(OURS, ""), "", ""]
    peers = one.medians
    seconds = peers.pop(OURS)
    rate = f"{work.bytes / seconds / 1e12:.2f} TB/s"
    if bound == "matrix":
        rate = f"{work.flops / seconds / 1e12:.0f} TFLOP/s"
    missing = {name: note.partition(":")[0] for name, note in one.notes.items() if name != OURS}
    times = {name: f"{time * 1e6:.1f}" for name, time in peers.items()}
    said = ", ".join(f"{name} {text}" for name, text in {**missing, **times}.items())
    verdicts = "; ".join(verdict.text for verdict in judged)
    shown = [f"{seconds * 1e6:.1f}", f"{floor / seconds:.2f}", rate, said, verdicts]
    return [*start, *shown, f"{one.host * 1e6:.1f}"]


def _details(measured: Sequence[Measured], ceilings: Ceilings | None) -> dict[str, Any]:
    judged = _judged(measured, ceilings) if ceilings else {}
    return {
        "cases": [
            {
                "kernel": one.case.kernel,
                "shape": one.case.shape,
                "floor_seconds": ceilings.floor(one.case.work) if ceilings else None,
                "seconds": one.medians if ceilings else {},
                "errors": one.errors,
                "notes": one.notes,
                "targets": [
                    {"target": v.target.text, "reached": v.reached, "met": v.met}
                    for v in judged.get(one.case.title, [])
                ],
            }
            for one in measured
        ]
    }


def _setting(on: str, seed: int) -> Setting:
    if on == "emulation":
        generator = torch.Generator().manual_seed(seed)
        return Setting(loader=EmulatedLoader(), generator=generator, cache_bytes=0)
    from gpu.kernels.device import DeviceLoader

    loader = DeviceLoader()
    try:
        loader.prepare(sources())  # side by side, and kept on disk for other processes
    except KernelBuildError as error:
        print(f"a kernel can't be built, and its cases will fail: {error}", flush=True)
    cache_bytes = torch.cuda.get_device_properties(loader.device).L2_cache_size
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return Setting(loader=loader, generator=generator, cache_bytes=cache_bytes)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m bench.kernels", description=__doc__, formatter_class=raw
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="one or two shapes of each kernel")
    add("--kernel", action="append", default=[], metavar="NAME", help="this kernel's cases alone")
    add(
        "--only",
        action="append",
        default=[],
        metavar="TEXT",
        help="run only cases with TEXT in the title",
    )
    add("--seed", type=int, default=0, help="seed of the random inputs")
    add_options(parser, seconds=480)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases that were asked for. The exit status is 1 if one of our kernels failed."""
    options = _options(arguments)
    on_gpu = options.on == "gpu"
    began = time.monotonic()
    if on_gpu and not torch.cuda.is_available():
        print("bench.kernels: no GPU was found; --on emulation checks the kernels without one")
        return 1
    setting = _setting(options.on, options.seed)
    cases = [
        case
        for case in all_cases(tiny=not on_gpu)
        if (case.quick or not options.quick)
        and (not options.kernel or case.kernel in options.kernel)
        and all(text in case.title for text in options.only)
    ]
    cases.sort(key=lambda case: not case.quick)  # the most telling first, if time runs out
    if not cases:
        print("bench.kernels: there is no such case")
        return 1
    ceilings = measure_ceilings() if on_gpu else None
    if ceilings:
        print(describe_ceilings(ceilings), flush=True)
    stopwatch: Stopwatch = GraphStopwatch() if on_gpu else DryRun()
    result = ResultFile.start(options.out, "kernels" if on_gpu else "kernels-emulated")

    def save(measured: Sequence[Measured]) -> None:
        text, details = table(measured, ceilings), _details(measured, ceilings)
        result.save(ceilings=ceilings, table=text, details=details)

    left = options.seconds - (time.monotonic() - began)
    measured = run_cases(cases, setting, stopwatch, left, save)
    print(f"\n{summary(measured, ceilings) if ceilings else table(measured, None)}\n")
    print(f"saved to {result.path}")
    if failed := [one.case.title for one in measured if one.failed]:
        print(f"failed: {', '.join(failed)}")
    if not_run := [case.title for case in cases[len(measured) :]]:
        print(f"not run: {', '.join(not_run)}")
    return 1 if failed or not_run else 0


if __name__ == "__main__":
    sys.exit(main())
