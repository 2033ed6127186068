"""``python -m gpu.kernels``: compile every kernel for every target and hold it to the budget."""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Sequence

from gpu.kernels import KernelSource, nvrtc, sass
from gpu.kernels.budget import BUDGET, Budget, BudgetViolation, MeasuredKernel, replace_costs
from gpu.kernels.catalogue import digests, sources
from gpu.kernels.cubins import CubinCache, Outcome, build_all, default_jobs
from gpu.kernels.nvrtc import KernelBuildError
from gpu.kernels.targets import TARGETS

_DESCRIPTION = f"""\
Compile the CUDA kernels with NVRTC and print what each costs: registers of a thread, shared memory
of a block, local memory where there is any (spilled registers, arrays indexed at run time), and how
many blocks run side by side on one multiprocessor. Needs no GPU and no driver.

Ends with 1 where a kernel doesn't compile or breaks the budget of {BUDGET.name}, and says how.
"""
_EPILOG = f"""\
The targets are {", ".join(TARGETS)}. Built kernels are kept, so a second run is quick.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, do what it says, and return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.write_budget and options.target:
        parser.error("--write-budget needs every target: leave out --target")
    catalogue = sources()
    wanted = [each for each in catalogue if not options.kernel or each.name in options.kernel]
    unknown = set(options.kernel) - {each.name for each in catalogue}
    if unknown:
        names = ", ".join(sorted({each.name for each in catalogue}))
        parser.error(f"no kernel {', '.join(sorted(unknown))}; there are {names}")
    targets = options.target or list(TARGETS)
    started = time.monotonic()
    try:
        compiler = nvrtc.compiler()
        budget = Budget.read(BUDGET.read_text())
        now = digests(wanted)
        measured, failures = measure(wanted, targets, budget, options.jobs, show=True)
    except (KernelBuildError, sass.SassError) as error:
        print(f"python -m gpu.kernels: {error}", file=sys.stderr)
        return 1
    print(*table(measured, targets), sep="\n")
    if options.write_budget and not failures:
        text = replace_costs(BUDGET.read_text(), measured, now, compiler, all_of=not options.kernel)
        BUDGET.write_text(text)
        budget = Budget.read(text)
    problems = [found for each in measured for found in budget.violations(each)]
    problems += budget.outdated(now)
    if not options.kernel:
        problems += budget.stale(catalogue)
    seconds = time.monotonic() - started
    print(f"\n{len(measured)} kernels built by {compiler} in {seconds:.0f} s", end="; ")
    if failures or problems:
        print("the budget is broken:" if problems else "these don't compile:")
        print(*failures, *explain(problems), sep="\n")
        if budget.compiler not in ("", compiler):
            print(f"(The budget was taken with {budget.compiler}.)")
        return 1
    print("all within the budget")
    return 0


def measure(
    wanted: Sequence[KernelSource],
    targets: Sequence[str],
    budget: Budget,
    jobs: int,
    *,
    show: bool = False,
) -> tuple[list[MeasuredKernel], list[str]]:
    """Build ``wanted`` for ``targets``: what was built, and why the rest wasn't.

    Kernels that must have certain instructions are disassembled. ``show`` tells of the progress on
    a terminal.

    Raises:
        SassError: there is no nvdisasm.
    """
    pairs = [(source, target) for source in wanted for target in targets]
    outcomes = build_all(
        CubinCache(), pairs, jobs, _show_progress if show and sys.stderr.isatty() else None
    )
    failures = [str(each.result) for each in outcomes if not isinstance(each.result, nvrtc.Build)]
    instructions = _instructions(outcomes, budget)
    measured = [
        MeasuredKernel(
            source=each.source,
            target=each.target,
            usage=each.result.usage,
            instructions=instructions.get((each.source, each.target)),
        )
        for each in outcomes
        if isinstance(each.result, nvrtc.Build)
    ]
    return measured, failures


def table(measured: Sequence[MeasuredKernel], targets: Sequence[str]) -> list[str]:
    """Return the lines that say what every kernel costs on every target."""
    rows: dict[KernelSource, dict[str, MeasuredKernel]] = defaultdict(dict)
    for each in measured:
        rows[each.source][each.target] = each
    lines = ["registers of a thread x blocks on a multiprocessor (+ bytes of local memory)", ""]
    kernel = ""
    for source, by_target in rows.items():
        if source.name != kernel:
            kernel = source.name
            lines.append(f"{'threads':>8}{'shared':>9}" + "".join(f"{t:>13}" for t in targets))
        cells = [_cell(by_target[target]) if target in by_target else "-" for target in targets]
        shared = max(each.shared for each in by_target.values())
        costs = "".join(f"{cell:>13}" for cell in cells)
        lines.append(f"{source.num_threads:>8}{shared:>9}{costs}  {source.title}")
    return lines


def explain(problems: Sequence[BudgetViolation]) -> list[str]:
    """Return the lines that say what is broken, under the title of each kernel."""
    by_title: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for each in problems:
        by_title[each.title][each.problem].append(each.target)
    lines = []
    for title, found in by_title.items():
        lines.append(title)
        for problem, targets in found.items():
            where = ", ".join(filter(None, targets))
            lines.append(f"  {where}: {problem}" if where else f"  {problem}")
    return lines


def _cell(each: MeasuredKernel) -> str:
    spilled = f" +{each.local}" if each.local else ""
    return f"{each.usage.registers} x{each.blocks}{spilled}"


def _instructions(
    outcomes: Sequence[Outcome], budget: Budget
) -> dict[tuple[KernelSource, str], sass.Instructions]:
    found: dict[tuple[KernelSource, str], sass.Instructions] = {}
    for target in {each.target for each in outcomes}:
        looked_at = {
            each.source: each.result.cubin
            for each in outcomes
            if each.target == target
            and isinstance(each.result, nvrtc.Build)
            and each.source.name in budget.instructions
        }
        if looked_at:
            counted = sass.disassemble(list(looked_at.values()), target)
            found.update(
                {(source, target): n for source, n in zip(looked_at, counted, strict=True)}
            )
    return found


def _show_progress(done: int, total: int) -> None:
    end = "\n" if done == total else ""
    print(f"\rcompiled {done} of {total}", end=end, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gpu.kernels",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--kernel",
        action="append",
        default=[],
        metavar="NAME",
        help="only this kernel, in all its variants; may be given several times",
    )
    parser.add_argument(
        "--target",
        action="append",
        default=[],
        choices=list(TARGETS),
        metavar="TARGET",
        help="compile for this target only; may be given several times",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=default_jobs(),
        metavar="N",
        help="kernels to compile at once (default: the cores of this machine)",
    )
    parser.add_argument(
        "--write-budget",
        action="store_true",
        help=f"take what was measured as the budget: rewrites {BUDGET.name}, with --kernel only "
        "the lines of those kernels",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
