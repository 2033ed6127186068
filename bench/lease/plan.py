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
MAX_FILES = 8
"""Files that come back from one command."""
SECONDS = "{seconds}"
"""Stands in a command for the whole seconds that the step has left when it starts."""

KERNEL_TESTS = Path("tests/kernels")
# These are about the compiler, the emulation and the fake GPU, not about what a GPU does.
HOST_TESTS = (
    "test_budget",
    "test_builds",
    "test_cubins",
    "test_emulation",
    "test_fake_gpu",
    "test_memory",
    "test_mutations",
    "test_sanitizers",
    "test_steps_on_fake_gpu",
)
# Each runs one kernel on small inputs. The first ones are the most telling.
SANITIZED_TESTS = (
    "test_decode_attention",
    "test_prefill_attention",
    "test_prefix_attention",
    "test_rope_and_write",
    "test_sampling",
    "test_combine_partials",
    "test_conformance",
    "test_lora",
    "test_rms_norm",
    "test_silu_mul",
    "test_token_movement",
)
WORKER_TESTS = (
    "tests/gpu/attention/test_attention.py",
    "tests/gpu/models/test_models.py",
    "tests/gpu/sampling/test_philox.py",
    "tests/gpu/test_runner.py",
    "tests/gpu/sampling/test_sampler.py",
    "tests/gpu/weights/test_weights.py",
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
FIRST_SCENARIO = "1x1k"
OTHER_SCENARIOS = ("256x1k", "32x8k", "32x1k")
CONTROLS = {
    "memcheck": "planted_overflow",
    "racecheck": "planted_race",
    "synccheck": "planted_barrier",
    "initcheck": "planted_gap",
}
"""Each tool of compute-sanitizer, and the planted fault that it must report."""
REPORTED = 9
"""The exit status of compute-sanitizer that says that it found something."""
_KERNEL_FILES = ("gpu/kernels/*.cu", "tests/kernels/conformance.cu", "bench/kernels/planted.cu")
_DEFINITION = re.compile(
    r'extern\s+"C"\s+__global__\s[^;{]*?\b(\w+)\s*\(\s*(?:const\s+)?Parameters\b'
    r"|#define\s+ENTRY\s+(\w+)"  # a source of several kernels names each so
)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One command.

    It goes well if it ends with ``status``, and its log has ``says`` in it.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    status: int = 0
    says: str = ""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Steps of one kind, up to ``at_once`` of them side by side.

    ``seconds`` is the bound of all of them. What earlier stages leave of theirs is added to it. The
    steps of a ``background`` stage start before all others, and its turn only waits for them.
    """

    name: str
    steps: tuple[Step, ...]
    seconds: float
    at_once: int = 1
    background: bool = False


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Place that a part runs in: a ``gpu`` or in the ``emulation``, with which Python.

    ``results`` is the folder for tables; ``install`` is the command that unpacks the carried
    packages, empty where there is nothing to install.
    """

    on: str
    python: str
    results: Path
    install: tuple[str, ...] = ()


def kernel_names() -> list[str]:
    """Return the kernels that sanitizers are to look at, and at no others.

    Those of the conformance tests and the planted faults are among them.
    """
    paths = [path for pattern in _KERNEL_FILES for path in sorted(ROOT.glob(pattern))]
    found = [names for path in paths for names in _DEFINITION.findall(path.read_text())]
    return sorted({one or other for one, other in found} - {"ENTRY"})


def stages_of(part: int, setting: Setting) -> list[Stage]:
    """Return what ``part`` runs, the most telling first."""
    chosen = {1: _first, 2: _second, 3: _third}[part](setting)
    if setting.install:
        install = Step(name="install", command=setting.install)
        chosen.insert(0, Stage(name="install", steps=(install,), seconds=40))
    return chosen


def deadline(stages: Sequence[Stage], number: int, now: float, end: float) -> float:
    """Return when the stage of this number has to be over that starts ``now``.

    Those behind it keep their own seconds, as long as there are enough for this one.
    """
    stage, later = stages[number], stages[number + 1 :]
    if stage.background:
        return end
    return min(end, max(end - sum(each.seconds for each in later), now + stage.seconds))


def _first(setting: Setting) -> list[Stage]:
    """Return the stages that check the kernels, and time one decode step."""
    doctor = Step(name="doctor", command=(setting.python, "-m", "gpu", "--doctor"))
    if setting.on == "emulation":
        few = ("-k", "pack", *_files("test_conformance"))
        conformance = Step(name="conformance", command=(*_pytest(setting), *few))
        tests = []
    else:
        everything = _files("test_conformance")
        conformance = Step(name="conformance", command=(*_pytest(setting), *everything))
        tests = [Stage(name="tests", steps=_tests(setting), seconds=230, at_once=6)]
    return [
        Stage(name="doctor", steps=(doctor,), seconds=45),
        Stage(name="conformance", steps=(conformance,), seconds=60),
        *tests,
        Stage(name="step", steps=(_steps(setting, FIRST_SCENARIO),), seconds=130),
        *_peers(setting, seconds=30, background=True),
    ]


def _second(setting: Setting) -> list[Stage]:
    """Return the stages that time each kernel beside its peers."""
    stages = _peers(setting, seconds=140, background=False)
    for name, (kernels, seconds) in KERNEL_GROUPS.items():
        # A process for each group: a kernel that spoils its context spoils no other's result.
        command = [setting.python, "-m", "bench.kernels", *_measured(setting)]
        for kernel in kernels:
            command += ["--kernel", kernel]
        steps = (Step(name=name, command=tuple(command)),)
        stages.append(Stage(name=f"kernels {name}", steps=steps, seconds=seconds))
    return stages


def _third(setting: Setting) -> list[Stage]:
    """Return the stages of the sanitizers, of the whole server and of the other decode steps."""
    engine = (setting.python, "-m", "bench.decode_step", "--engine", *_measured(setting))
    last = [
        Stage(name="engine", steps=(Step(name="engine", command=engine),), seconds=140),
        Stage(name="steps", steps=(_steps(setting, *OTHER_SCENARIOS),), seconds=80),
    ]
    if setting.on == "emulation":
        return last
    controls = tuple(
        _sanitized(setting, tool, f"control {tool}", ("-m", "bench.kernels.planted", fault), fault)
        for tool, fault in CONTROLS.items()
    )
    checks = tuple(
        _sanitized(setting, tool, f"{tool} {name}", (*_pytest(setting)[1:], *_files(name)))
        for tool in CONTROLS
        for name in SANITIZED_TESTS
    )
    return [
        Stage(name="sanitizer controls", steps=controls, seconds=60, at_once=4),
        Stage(name="sanitizers", steps=checks, seconds=210, at_once=8),
        *last,
    ]


def _measured(setting: Setting) -> tuple[str, ...]:
    return ("--on", setting.on, "--out", str(setting.results), "--seconds", SECONDS)


def _steps(setting: Setting, *scenarios: str) -> Step:
    command = [setting.python, "-m", "bench.decode_step", *_measured(setting)]
    # The emulation's scenarios have other names.
    if setting.on == "gpu":
        for scenario in scenarios:
            command += ["--scenario", scenario]
    return Step(name="decode steps", command=tuple(command))


def _pytest(setting: Setting) -> tuple[str, ...]:
    where = "gpu" if setting.on == "gpu" else "cpu"
    return (setting.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--kernels-on={where}")


def _files(*names: str) -> tuple[str, ...]:
    return tuple(str(KERNEL_TESTS / f"{name}.py") for name in names)


def _tests(setting: Setting) -> tuple[Step, ...]:
    """Return a process for each file: a fault on the device ends the tests of one kernel."""
    names = [path.stem for path in sorted((ROOT / KERNEL_TESTS).glob("test_*.py"))]
    done = (*HOST_TESTS, "test_conformance")
    # Single kernels first: what they get wrong explains what a whole model does.
    names = [*SANITIZED_TESTS, *(name for name in names if name not in SANITIZED_TESTS)]
    groups = {name: _files(name) for name in names if name not in done}
    groups["worker tests"] = WORKER_TESTS
    environment = {"OMP_NUM_THREADS": "2"}
    return tuple(
        Step(name=name, command=(*_pytest(setting), *tests), environment=environment)
        for name, tests in groups.items()
    )


def _peers(setting: Setting, *, seconds: float, background: bool) -> list[Stage]:
    """Return the compilation of the peers' kernels by nvcc; it is kept for the next part."""
    if setting.on == "emulation":
        return []
    command = ("nice", "-n", "19", setting.python, "-m", "bench.kernels.build_peers")
    steps = (Step(name="peers", command=command, environment={"MAX_JOBS": "8"}),)
    return [Stage(name="peers", steps=steps, seconds=seconds, background=background)]


def _sanitized(
    setting: Setting, tool: str, name: str, command: Sequence[str], reported: str = ""
) -> Step:
    """Run ``command`` of Python under ``tool``, which must find nothing, or ``reported``."""
    only: list[str] = []
    # What torch's kernels write counts as written only where those are watched, too.
    if tool != "initcheck":
        # Once for each: several names in one option may have to hold all at once.
        for kernel in kernel_names():
            only += ["--kernel-name", f"kne={kernel}"]
    options = ("--tool", tool, "--error-exitcode", str(REPORTED), *only)
    return Step(
        name=name,
        command=("compute-sanitizer", *options, setting.python, *command),
        # Each tensor has an allocation of its own, so that its end can be seen.
        environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        status=REPORTED if reported else 0,
        says=reported,
    )
