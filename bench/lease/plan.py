"""The steps of each part, their order and their bounds. Nothing here starts a process."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARTS = (1, 2, 3)
LIMIT = 560.0
"""Seconds of one call. A rented machine may end a command after 600."""
RESERVE = 15.0
"""Seconds of a call that no stage gets: for ending processes and for the last archive."""
SECONDS = "{seconds}"
"""Stands in a command for the whole seconds that the step has left when it starts."""

# Of tests/kernels: about the compiler, the emulation and the fake GPU, not what a GPU does.
HOST_TESTS = (
    *("budget", "builds", "cubins", "emulation", "fake_gpu", "memory", "mutations", "sanitizers"),
    *("steps_on_fake_gpu", "ranks", "ranks_on_fake_gpu"),
)
# Of tests/kernels: each runs one kernel on small inputs. The first ones are the most telling.
SANITIZED_TESTS = (
    *("decode_attention", "prefill_attention", "prefix_attention", "rope_and_write", "sampling"),
    *("combine_partials", "conformance", "lora", "rms_norm", "silu_mul", "token_movement"),
)
WORKER_TESTS = (
    *("tests/gpu/attention/test_attention.py", "tests/gpu/models/test_models.py"),
    *("tests/gpu/sampling/test_philox.py", "tests/gpu/test_runner.py"),
    *("tests/gpu/sampling/test_sampler.py", "tests/gpu/weights/test_weights.py"),
    "tests/gpu/test_worker.py",
)
# Kernels that are measured in one process, and the seconds of that.
KERNEL_GROUPS: Mapping[str, tuple[tuple[str, ...], float]] = {
    "decode": (("decode_attention",), 130.0),
    "prefill": (("prefill_attention", "shared_prefix"), 90.0),
    "fused": (("rms_norm", "silu_mul", "rope_and_write", "gather_tokens"), 55.0),
    "sampling": (("sampling",), 45.0),
    "lora": (("lora",), 30.0),
}
CONTROLS = {
    "memcheck": "planted_overflow",
    "racecheck": "planted_race",
    "synccheck": "planted_barrier",
    "initcheck": "planted_gap",
}
"""Each tool of compute-sanitizer, and the planted fault that it must report."""
REPORTED = 9
"""The exit status of compute-sanitizer that says that it found something."""
_NEED_A_GPU = ("tests", "peers", "sanitizer controls", "sanitizers")
_KERNEL_FILES = ("gpu/kernels/*.cu", "tests/kernels/conformance.cu", "bench/kernels/planted.cu")
_DEFINITION = re.compile(
    r'extern\s+"C"\s+__global__\s[^;{]*?\b(\w+)\s*\(\s*(?:const\s+)?Parameters\b'
    r"|#define\s+ENTRY\s+(\w+)"  # a source of several kernels names each so
)


@dataclass(frozen=True)
class Step:
    """One command.

    It goes well if it ends with ``status``, and its log has ``says`` in it.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    status: int = 0
    says: str = ""


@dataclass(frozen=True)
class Stage:
    """Steps of one kind, up to ``at_once`` of them side by side.

    ``seconds`` is the bound of all of them. What earlier stages leave of theirs is added to it. The
    steps of a ``background`` stage start before all others, and its turn only waits for them.
    """

    name: str
    seconds: float
    steps: Sequence[Step]
    at_once: int = 1
    background: bool = False


@dataclass(frozen=True)
class Setting:
    """Place that a part runs in: a ``gpu`` or in the ``emulation``, with which Python.

    ``results`` is the folder for tables; ``install`` is the command that unpacks the carried
    packages, empty where there is nothing to install.
    """

    on: str
    python: str
    results: Path
    install: Sequence[str] = ()

    def measure(self, module: str, *options: str) -> list[str]:
        """Return the command of a benchmark."""
        how = ["--on", self.on, "--out", str(self.results), "--seconds", SECONDS]
        return [self.python, "-m", module, *how, *options]

    def decode_steps(self, *scenarios: str) -> list[str]:
        """Return the command that times decode steps; the emulation runs all of its own."""
        options = [each for one in scenarios for each in ("--scenario", one)]
        return self.measure("bench.decode_step", *(options if self.on == "gpu" else ()))

    def pytest(self, *tests: str) -> list[str]:
        """Return the command that runs test files, the kernels where the setting says."""
        where = "gpu" if self.on == "gpu" else "cpu"
        options = ["-q", "-rs", "-p", "no:cacheprovider", f"--kernels-on={where}"]
        return [self.python, "-m", "pytest", *options, *tests]


def kernel_names() -> list[str]:
    """Return the kernels that sanitizers are to look at, and at no others.

    Those of the conformance tests and the planted faults are among them.
    """
    paths = [path for pattern in _KERNEL_FILES for path in sorted(ROOT.glob(pattern))]
    found = [names for path in paths for names in _DEFINITION.findall(path.read_text())]
    return sorted({one or other for one, other in found} - {"ENTRY"})


def kernel_tests(name: str) -> str:
    """Return the file of one kernel's tests."""
    return f"tests/kernels/test_{name}.py"


def stages_of(part: int, setting: Setting) -> list[Stage]:
    """Return what ``part`` runs, the most telling first."""
    stages = {1: _first, 2: _second, 3: _third}[part](setting)
    if setting.on == "emulation":
        stages = [stage for stage in stages if stage.name not in _NEED_A_GPU]
    return [_alone("install", 40, setting.install), *stages] if setting.install else stages


def deadline(stages: Sequence[Stage], number: int, now: float, end: float) -> float:
    """Return when the stage of this number has to be over that starts ``now``.

    Those behind it keep their own seconds, as long as there are enough for this one.
    """
    stage, later = stages[number], stages[number + 1 :]
    if stage.background:
        return end
    return min(end, max(end - sum(each.seconds for each in later), now + stage.seconds))


def _alone(name: str, seconds: float, command: Sequence[str]) -> Stage:
    return Stage(name, seconds, [Step(name, command)])


def _first(setting: Setting) -> list[Stage]:
    """Return the stages that check the kernels, and time one decode step."""
    few = () if setting.on == "gpu" else ("--thorough", "-k", "pack")
    return [
        _alone("doctor", 45, (setting.python, "-m", "gpu", "--doctor")),
        _alone("conformance", 60, setting.pytest(*few, kernel_tests("conformance"))),
        Stage("tests", 230, _tests(setting), at_once=6),
        _alone("step", 130, setting.decode_steps("1x1k")),
        _peers(setting, 30, background=True),
    ]


def _second(setting: Setting) -> list[Stage]:
    """Return the stages that time each kernel beside its peers."""
    stages = [_peers(setting, 140)]
    for name, (kernels, seconds) in KERNEL_GROUPS.items():
        # A process for each group: a kernel that spoils its context spoils no other's result.
        options = [each for kernel in kernels for each in ("--kernel", kernel)]
        command = setting.measure("bench.kernels", *options)
        stages.append(_alone(f"kernels {name}", seconds, command))
    return stages


def _third(setting: Setting) -> list[Stage]:
    """Return the stages of the sanitizers, of the whole server and of the other decode steps."""
    controls = [
        _sanitized(tool, f"control {tool}", setting.python, "-m", "bench.kernels.planted", fault)
        for tool, fault in CONTROLS.items()
    ]
    checks = [
        _sanitized(tool, f"{tool} {name}", *setting.pytest(kernel_tests(name)))
        for tool in CONTROLS
        for name in SANITIZED_TESTS
    ]
    return [
        Stage("sanitizer controls", 60, controls, at_once=4),
        Stage("sanitizers", 210, checks, at_once=8),
        _alone("engine", 140, setting.measure("bench.decode_step", "--engine")),
        _alone("steps", 80, setting.decode_steps("256x1k", "32x8k", "32x1k")),
    ]


def _tests(setting: Setting) -> list[Step]:
    """Return a process for each file: a fault on the device ends the tests of one kernel."""
    found = (path.stem.removeprefix("test_") for path in ROOT.glob(kernel_tests("*")))
    # Single kernels first: what they get wrong explains what a whole model does.
    names = dict.fromkeys([*SANITIZED_TESTS, *sorted(found)])
    others = {*HOST_TESTS, "conformance"}
    groups = {name: [kernel_tests(name)] for name in names if name not in others}
    groups["worker tests"] = list(WORKER_TESTS)
    return [Step(n, setting.pytest(*each), {"OMP_NUM_THREADS": "2"}) for n, each in groups.items()]


def _peers(setting: Setting, seconds: float, *, background: bool = False) -> Stage:
    """Return the compilation of the peers' kernels by nvcc; it is kept for the next part."""
    command = ("nice", "-n", "19", setting.python, "-m", "bench.kernels.build_peers")
    return Stage("peers", seconds, [Step("peers", command, {"MAX_JOBS": "8"})], 1, background)


def _sanitized(tool: str, name: str, *command: str) -> Step:
    """Run ``command`` of Python under ``tool``, which must find nothing, or the planted fault."""
    reported = CONTROLS[tool] if command[-1] == CONTROLS[tool] else ""
    # Once for each: several names in one option may have to hold all at once. What torch's kernels
    # write counts as written for initcheck only where those are watched, too.
    kernels = [] if tool == "initcheck" else kernel_names()
    only = [each for kernel in kernels for each in ("--kernel-name", f"kne={kernel}")]
    options = ("--tool", tool, "--error-exitcode", str(REPORTED), *only)
    return Step(
        name,
        ("compute-sanitizer", *options, *command),
        # Each tensor has an allocation of its own, so that its end can be seen.
        {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        status=REPORTED if reported else 0,
        says=reported,
    )
