"""Each kernel beside its floor and its peers: ``python -m bench.kernels``.

The card's own copy and matrix rates are measured in the same run. Every contestant is checked
against a float64 reference on the same inputs before anybody is timed; then all of a case are
measured in turn, three times over. A peer that is not installed or does not offer a case is named.
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
from pathlib import Path
from typing import Any

import attrs
import torch

from bench.kernels.all import all_cases
from bench.kernels.case import Case, Contestant, Peer, PeerAbsent, Setting
from bench.kernels.report import RESULTS, ResultFile, describe_ceilings, markdown_table
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
    """What became of one case: seconds of each contestant in each round, and what was said of it.

    ``errors`` are distances from the reference. ``host`` is what handing over one of our launches
    takes in Python. ``notes`` say why a peer is missing, and what failed. Without ours in
    ``seconds`` the case failed.
    """

    case: Case
    seconds: dict[str, list[float]]
    errors: dict[str, float]
    notes: dict[str, str]
    host: float = math.nan

    @property
    def failed(self) -> bool:
        """Whether our own kernel was wrong or did not run."""
        return OURS not in self.seconds

    def median(self, name: str) -> float:
        """The median over the rounds."""
        return statistics.median(self.seconds[name])

    def result(self, ceilings: Ceilings) -> Result:
        """For :func:`bench.kernels.targets.judge`."""
        return Result(
            title=self.case.title,
            floor=ceilings.floor(self.case.work),
            seconds=self.median(OURS),
            peers={name: self.median(name) for name in self.seconds if name != OURS},
        )


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

    peers: list[Peer] = []
    host = math.nan
    try:
        trial = case.make(setting)
        enter(OURS, trial.ours)
        host = stopwatch.host_seconds(trial.ours.launches)
        peers = list(trial.peers)
    except Exception as error:  # one kernel's failure is no reason to lose the others
        notes[OURS] = _one_line(error)
    for peer in peers:
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
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}"[:200]


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
        measured.append(measure(case, setting, stopwatch))
        gc.collect()
        if setting.device.type == "cuda":
            torch.cuda.empty_cache()
        _report(measured[-1], time.monotonic() - began)
        save(measured)
    return measured


def _report(measured: Measured, took: float) -> None:
    times = [
        f"{name} {statistics.median(values) * 1e6:.1f}"
        for name, values in measured.seconds.items()
        if not math.isnan(values[0])
    ]
    notes = [f"{name} {note}" for name, note in measured.notes.items()]
    print(f"{measured.case.title} [{took:.1f} s]: {'; '.join([*times, *notes])}", flush=True)


def _judged(measured: Sequence[Measured], ceilings: Ceilings) -> dict[str, list[Judged]]:
    results = {one.case.title: one.result(ceilings) for one in measured if not one.failed}
    return {
        one.case.title: [judge(t, results[one.case.title], results) for t in one.case.targets]
        for one in measured
        if not one.failed
    }


def table(measured: Sequence[Measured], ceilings: Ceilings | None) -> str:
    """The Markdown table: a row for each case. Without ceilings it tells only what was checked."""
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
    """A narrow table for the end of the output: the fastest peer and the verdicts alone."""
    judged = _judged(measured, ceilings)
    rows = []
    for one in measured:
        cells = [f"{one.case.kernel} {one.case.shape}"]
        if one.failed:
            rows.append([*cells, "", "FAILED", "", one.notes.get(OURS, "")[:60]])
            continue
        seconds, floor = one.median(OURS), ceilings.floor(one.case.work)
        peers = {name: one.median(name) for name in one.seconds if name != OURS}
        best = min(peers, key=peers.__getitem__, default="")
        verdicts = {True: "met", False: "MISSED", None: "?"}
        rows.append(
            [
                *cells,
                f"{seconds * 1e6:.1f}",
                f"{floor / seconds:.2f}",
                f"{best} {peers[best] * 1e6:.1f}" if best else "",
                " ".join(verdicts[verdict.met] for verdict in judged[one.case.title]),
            ]
        )
    return markdown_table(["case", "µs", "floor", "best peer", "targets"], rows)


def _error(one: Measured) -> str:
    return f"{one.errors[OURS]:.1e}" if OURS in one.errors else one.notes.get(OURS, "")


def _row(one: Measured, ceilings: Ceilings, judged: Sequence[Judged]) -> list[str]:
    work = one.case.work
    floor, bound = ceilings.floor(work), ceilings.bound(work)
    start = [one.case.kernel, one.case.shape, bound, f"{floor * 1e6:.1f}"]
    if one.failed:
        return [*start, "FAILED", "", "", one.notes.get(OURS, ""), "", ""]
    seconds = one.median(OURS)
    rate = f"{work.bytes / seconds / 1e12:.2f} TB/s"
    if bound == "matrix":
        rate = f"{work.flops / seconds / 1e12:.0f} TFLOP/s"
    peers = {name: f"{one.median(name) * 1e6:.1f}" for name in one.seconds if name != OURS}
    missing = {name: note.partition(":")[0] for name, note in one.notes.items() if name != OURS}
    said = [f"{name} {text}" for name, text in {**missing, **peers}.items()]
    verdicts = "; ".join(verdict.text for verdict in judged)
    ours = f"{seconds * 1e6:.1f}"
    launch = f"{one.host * 1e6:.1f}"
    return [*start, ours, f"{floor / seconds:.2f}", rate, ", ".join(said), verdicts, launch]


def _details(measured: Sequence[Measured], ceilings: Ceilings | None) -> dict[str, Any]:
    judged = _judged(measured, ceilings) if ceilings else {}
    return {
        "cases": [
            {
                "kernel": one.case.kernel,
                "shape": one.case.shape,
                "bytes": one.case.work.bytes,
                "flops": one.case.work.flops,
                "floor_seconds": ceilings.floor(one.case.work) if ceilings else None,
                "seconds": one.seconds if ceilings else {},
                "host_seconds": one.host if ceilings else None,
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
    parser = argparse.ArgumentParser(
        prog="python -m bench.kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="one or two shapes of each kernel")
    add("--kernel", action="append", default=[], metavar="NAME", help="this kernel's cases alone")
    add("--only", action="append", default=[], metavar="TEXT", help="cases whose title holds it")
    add("--out", type=Path, default=RESULTS, help="folder for the results")
    add("--on", choices=["gpu", "emulation"], default="gpu")
    add("--seconds", type=float, default=480, help="no case starts after so many")
    add("--seed", type=int, default=0, help="of the random inputs")
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

    measured = run_cases(
        cases, setting, stopwatch, options.seconds - (time.monotonic() - began), save
    )
    shown = summary(measured, ceilings) if ceilings else table(measured, None)
    print(f"\n{shown}\n")
    print(f"saved to {result.path}")
    failed = [one.case.title for one in measured if one.failed]
    if failed:
        print(f"failed: {', '.join(failed)}")
    if len(measured) < len(cases):
        print(f"not run: {', '.join(case.title for case in cases[len(measured) :])}")
    return 1 if failed or len(measured) < len(cases) else 0


if __name__ == "__main__":
    sys.exit(main())
