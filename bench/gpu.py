"""Everything that needs a GPU, in one call: ``python -m bench.gpu``.

Parts, in this order; ``--parts`` chooses among them:

- ``doctor``     what torch and CuPy find
- ``builds``     every kernel compiled for this GPU, beside the budget of registers and memory
- ``tests``      the kernels' tests on the device, and the worker's tests
- ``kernels``    ``bench.kernels``: each kernel beside its floor and its peers
- ``steps``      ``bench.decode_step``: whole decode steps beside their floor
- ``engine``     ``bench.decode_step --engine``: the GPU's idle share behind HTTP
- ``sanitizer``  tests of single kernels under compute-sanitizer's four tools, side by side

Each step has a bound of its own, and ``--seconds`` bounds the whole call. A step that fails or runs
out of time doesn't stop those behind it. The last lines are a summary; the exit status is 1 if
anything failed or had no time. Without a GPU, what can run without one does, and the call fails
with a line that says so.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from bench.gpu_report import RESULTS
from gpu.kernels import nvrtc
from gpu.kernels.nvrtc import KernelBuildError
from gpu.kernels.targets import TARGETS, target_for

__all__ = ["PARTS", "Outcome", "Step", "kernel_names", "main", "run_steps", "steps_of"]

ROOT = Path(__file__).parents[1]
PARTS = ("doctor", "builds", "tests", "kernels", "steps", "engine", "sanitizer")
WORKER_TESTS = (
    "tests/test_attention.py",
    "tests/test_models.py",
    "tests/test_philox.py",
    "tests/test_runner.py",
    "tests/test_sampler.py",
    "tests/test_weights.py",
    "tests/test_worker.py",
)
KERNEL_TESTS = Path("tests/kernels")
# These are about the compiler and the emulation, not about what a GPU does.
HOST_TESTS = (
    "test_budget",
    "test_builds",
    "test_emulation",
    "test_memory",
    "test_mutations",
    "test_sanitizers",
)
# Each runs one kernel on small inputs.
SANITIZED_TESTS = (
    "test_combine_partials",
    "test_conformance",
    "test_decode_attention",
    "test_lora",
    "test_prefill_attention",
    "test_prefix_attention",
    "test_rms_norm",
    "test_rope_and_write",
    "test_sampling",
    "test_silu_mul",
    "test_token_movement",
)
# Groups of kernels that are measured in one process, and its bound in seconds.
KERNEL_GROUPS = {
    "decode": (("decode_attention",), 240.0),
    "prefill": (("prefill_attention", "shared_prefix"), 200.0),
    "fused": (("rms_norm", "silu_mul", "rope_and_write", "gather_tokens"), 120.0),
    "lora": (("lora",), 60.0),
    "sampling": (("sampling",), 150.0),
}
SANITIZER_TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
_LAST_CASE = 45.0  # seconds that the last case of a group may take
_DEFINITION = re.compile(
    r'extern\s+"C"\s+__global__\s[^;{]*?\b(\w+)\s*\(\s*(?:const\s+)?Parameters\b'
)


@attrs.frozen(kw_only=True)
class Step:
    """One command of a part.

    Steps of a part that are ``together`` run side by side. An ``early`` one starts before all
    others, and is waited for when its turn comes.
    """

    part: str
    name: str
    command: list[str]
    seconds: float
    environment: dict[str, str] = attrs.field(factory=dict)
    together: bool = False
    early: bool = False
    tail: int = 25
    """How many of its last lines are shown; of a quiet one that went well, only one."""
    quiet: bool = False


@attrs.frozen(kw_only=True)
class Outcome:
    """How a step ended: ``ok``, ``failed``, ``out of time`` or ``not run``."""

    step: Step
    verdict: str
    seconds: float = 0.0


def kernel_names(folder: Path = ROOT / "gpu" / "kernels") -> list[str]:
    """The kernels that the sources define, for tools that are to look at no others."""
    sources = (path.read_text() for path in sorted(folder.glob("*.cu")))
    return sorted({name for source in sources for name in _DEFINITION.findall(source)})


def steps_of(parts: Sequence[str], *, target: str | None, quick: bool, out: Path) -> list[Step]:
    """The commands of ``parts``: those that need a GPU only where there is one.

    ``target`` is what kernels are compiled for on the GPU that is there; None if there is none, and
    then they are compiled for every target.
    """
    python, has_gpu = sys.executable, target is not None
    build = [python, "-m", "gpu.kernels", *(["--target", target] if target in TARGETS else [])]
    build_seconds = 400 if has_gpu else 1800  # for one target, or for all
    bench_options = [*(["--quick"] if quick else []), "--out", str(out)]
    bench_options += ["--on", "gpu" if has_gpu else "emulation"]
    steps = [
        Step(part="doctor", name="doctor", command=[python, "-m", "gpu", "--doctor"], seconds=90),
        Step(part="builds", name="builds", command=build, seconds=build_seconds, quiet=True),
        *(_tests() if has_gpu else []),
        *(_peers() if has_gpu else []),
        *_kernels(bench_options),
        Step(
            part="steps",
            name="steps",
            command=[python, "-m", "bench.decode_step", *bench_options, "--seconds", "230"],
            seconds=300,
            tail=80,
        ),
    ]
    if has_gpu:
        engine = [python, "-m", "bench.decode_step", "--engine", *bench_options]
        steps.append(Step(part="engine", name="engine", command=engine, seconds=300))
        steps += _sanitizers()
    return [step for step in steps if step.part in parts]


def _kernels(options: Sequence[str]) -> Iterator[Step]:
    """A process for each group: a kernel that spoils its context spoils no other's result."""
    for name, (kernels, seconds) in KERNEL_GROUPS.items():
        # It stops by itself in time to print and save what it has.
        limit = ["--seconds", str(seconds - _LAST_CASE)]
        command = [sys.executable, "-m", "bench.kernels", *options, *limit]
        for kernel in kernels:
            command += ["--kernel", kernel]
        yield Step(part="kernels", name=name, command=command, seconds=seconds, tail=32)


def _tests() -> Iterator[Step]:
    """A process for each file, all at once: a fault on the device ends the tests of one kernel."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--kernels-on=gpu"]
    files = sorted((ROOT / KERNEL_TESTS).glob("test_*.py"))
    names = [file.stem for file in files if file.stem not in HOST_TESTS]
    groups = {name: [str(KERNEL_TESTS / f"{name}.py")] for name in names}
    groups["worker tests"] = list(WORKER_TESTS)
    for name, tests in groups.items():
        yield Step(
            part="tests",
            name=name,
            command=[*pytest, *tests],
            seconds=300,
            environment={"OMP_NUM_THREADS": "2"},
            together=True,
            quiet=True,
        )


def _sanitizers() -> Iterator[Step]:
    found = shutil.which("compute-sanitizer") or "compute-sanitizer"
    only = ["--kernel-name", ",".join(f"kne={name}" for name in kernel_names())]
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--kernels-on=gpu"]
    tests = [str(KERNEL_TESTS / f"{name}.py") for name in SANITIZED_TESTS]
    for tool in SANITIZER_TOOLS:
        # What torch's kernels write counts as written only where those are watched, too.
        watched = [] if tool == "initcheck" else only
        command = [found, "--tool", tool, "--error-exitcode", "9", *watched]
        yield Step(
            part="sanitizer",
            name=tool,
            command=[*command, *pytest, *tests],
            seconds=420,
            # Each tensor has an allocation of its own, so that its end can be seen.
            environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            together=True,
            quiet=True,
        )


def _peers() -> Iterator[Step]:
    """The peers' kernels are compiled by nvcc for minutes: beside the tests, not after them."""
    command = [sys.executable, "-m", "bench.kernel_peers.build"]
    yield Step(part="kernels", name="peers", command=command, seconds=300, early=True)


def run_steps(steps: Sequence[Step], logs: Path, seconds: float) -> list[Outcome]:
    """Run ``steps`` in order within ``seconds``.

    The output of each goes to a file in ``logs``, and its end to standard output.
    """
    logs.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + seconds
    outcomes: list[Outcome] = []
    with contextlib.ExitStack() as stack:
        early = {
            step.name: _Running(step, stack.enter_context(_started(step, logs)))
            for step in steps
            if step.early
        }
        for group in _groups(steps):
            if deadline - time.monotonic() < 1:
                outcomes += [Outcome(step=step, verdict="not run") for step in group]
                continue
            with contextlib.ExitStack() as inner:
                running = [
                    early.get(step.name)
                    or _Running(step, inner.enter_context(_started(step, logs)))
                    for step in group
                ]
                finished = [one.wait(deadline) for one in running]
            for outcome in finished:
                _show(outcome, logs)
            outcomes += finished
    return outcomes


def _groups(steps: Sequence[Step]) -> list[list[Step]]:
    """Neighbors of one part that run side by side stand in one list; others are alone in theirs."""
    groups: list[list[Step]] = []
    for step in steps:
        last = groups[-1][-1] if groups else None
        if last and step.together and last.together and last.part == step.part:
            groups[-1].append(step)
        else:
            groups.append([step])
    return groups


class _Running:
    """A step that has been started; ``process`` is None if there is no such program."""

    def __init__(self, step: Step, process: subprocess.Popen[bytes] | None) -> None:
        self._step = step
        self._process = process
        self._began = time.monotonic()

    def wait(self, deadline: float) -> Outcome:
        """How it ended, within its own bound and before ``deadline``."""
        verdict = "failed"
        if self._process is not None:
            bound = min(self._began + self._step.seconds, deadline)
            try:
                status = self._process.wait(max(bound - time.monotonic(), 0.1))
                verdict = "ok" if status == 0 else "failed"
            except subprocess.TimeoutExpired:
                verdict = "out of time"
        took = time.monotonic() - self._began
        return Outcome(step=self._step, verdict=verdict, seconds=took)


@contextlib.contextmanager
def _started(step: Step, logs: Path) -> Iterator[subprocess.Popen[bytes] | None]:
    """The running command; nothing of it is left afterwards. None if there is no such program."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **step.environment}
    with _log(step, logs).open("wb") as log:
        try:
            process = subprocess.Popen(
                step.command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except FileNotFoundError as error:
            log.write(f"{error}\n".encode())
            process = None
    try:
        yield process
    finally:
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _log(step: Step, logs: Path) -> Path:
    return logs / f"{step.part}-{step.name.replace(' ', '-')}.log"


def _show(outcome: Outcome, logs: Path) -> None:
    step = outcome.step
    lines = _log(step, logs).read_text(errors="replace").splitlines()
    print(f"\n== {step.part}: {step.name}: {outcome.verdict} after {outcome.seconds:.0f} s")
    shown = 1 if step.quiet and outcome.verdict == "ok" else step.tail
    print("\n".join(lines[-shown:]), flush=True)


def _summary(outcomes: Sequence[Outcome]) -> str:
    rows = [
        f"{outcome.step.part:10} {outcome.step.name:24} {outcome.verdict:12} "
        f"{outcome.seconds:6.0f} s"
        for outcome in outcomes
    ]
    return "\n".join(["", "== summary", *rows])


def find_target() -> str | None:
    """The target of the GPU that torch sees: None if it sees none, "" if kernels can't be built.

    Another process asks, since this one needs no memory of the GPU.
    """
    question = "import torch; print(*torch.cuda.get_device_capability())"
    answer = subprocess.run(
        [sys.executable, "-c", question], cwd=ROOT, check=False, capture_output=True, text=True
    )
    if answer.returncode:
        return None
    major, minor = (int(number) for number in answer.stdout.split()[-2:])
    try:
        return target_for((major, minor), nvrtc.capabilities())
    except KernelBuildError:  # the steps will say what is missing
        return ""


def _parts(text: str) -> list[str]:
    chosen = text.split(",")
    unknown = sorted(set(chosen) - set(PARTS))
    if unknown:
        raise argparse.ArgumentTypeError(f"no such part: {', '.join(unknown)}")
    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that were asked for, and sum up."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", type=_parts, default=list(PARTS), help="names, with commas")
    parser.add_argument("--quick", action="store_true", help="fewer shapes in the benchmarks")
    parser.add_argument("--seconds", type=float, default=3600, help="bound of the whole call")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for results")
    parser.add_argument("--logs", type=Path, help="folder for logs (default: OUT/logs)")
    options = parser.parse_args(arguments)
    out = options.out.absolute()
    target = find_target()
    steps = steps_of(options.parts, target=target, quick=options.quick, out=out)
    outcomes = run_steps(steps, options.logs or out / "logs", options.seconds)
    print(_summary(outcomes))
    failed = [outcome for outcome in outcomes if outcome.verdict != "ok"]
    if target is None:
        print("no GPU was found: the tests on a device were not run and nothing was timed")
    return 1 if failed or target is None else 0


if __name__ == "__main__":
    sys.exit(main())
